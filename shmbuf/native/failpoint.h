// FAILPOINT(name): nothing in the shipped module. With -DSHMBUF_FAILPOINTS (the second module, _native_failpoints) each
// passage is counted and may kill, stop or delay the process: tests walk all names (tests/process/test_failpoints.py).
#pragma once
#ifdef SHMBUF_FAILPOINTS
#include <cstdlib>
#include <signal.h>
#include <string>
#include <unistd.h>

namespace shmbuf::failpoint {
// Every label in the code, so that a test can tell a label that never fires from one that does not exist.
inline constexpr const char *kNames[] = {
    "claim_locked",   "claim_funded",  "claim_described", "claim_active",   "ring_reserved", "ring_half_record",
    "ring_copied",    "ring_published", "role_locked", "role_taken",     "plan_written",   "plan_sealed",   "txn_reserved",
    "txn_mid_row",    "txn_copied",    "txn_results",     "txn_committed",  "post_base",     "post_cursor",
    "post_head",      "post_woken",    "txn_done",        "role_leaving", "role_released",  "clear_planned", "skip_planned",
    "build_taken", "build_locked",   "build_grown",   "build_described", "build_ready",    "sweep_locked",  "sweep_freed",
    "slot_closing",   "close_drained", "txn_evicted",     "txn_linked",     "tree_kept",     "tree_leaf_read",
    "tree_leaves_set", "tree_children_read", "tree_level_done", "link_evicted", "link_counted", "link_cleared", "link_bits", "link_stream", "link_settled", "link_chained",
    "link_joined", "link_recycling", "link_recycled", "link_claimed", "limiter_ticket",
    "limiter_filled", "limiter_taken", "epoch_claimed", "event_filled", "pin_locked", "pin_stored", "pin_checked", "pin_released", "pin_swept", "pin_revoked", "pin_blocked",
    "edit_planned", "edit_raised", "edit_half", "edit_settled",
    "device_ring_locked", "device_ring_named", "device_put_begun", "device_put_copied", "device_copy_begun", "device_copied", "device_settled"};

enum class Action { none, kill, stop, sleep };
struct State {
  std::string name;
  Action action = Action::none;
  long hit = 1, seen = 0;
};
inline State &armed() { static State s; return s; }

// "name=action@hit": action kill, stop or sleep (50 ms); the hit-th passage acts, passages are counted from arming.
inline bool arm(const std::string &spec) {
  State next;
  auto eq = spec.find('='), at = spec.find('@');
  if (!spec.empty()) {
    next.name = spec.substr(0, eq);
    if (eq == std::string::npos) return false;
    std::string what = spec.substr(eq + 1, at == std::string::npos ? at : at - eq - 1);
    next.action = what == "kill" ? Action::kill : what == "stop" ? Action::stop : what == "sleep" ? Action::sleep : Action::none;
    if (next.action == Action::none) return false;
    if (at != std::string::npos) next.hit = std::atol(spec.c_str() + at + 1);
    bool known = false;
    for (auto *n : kNames) known |= next.name == n;
    if (!known) return false;
  }
  armed() = next;
  return true;
}
inline void pass(const char *name) {
  State &s = armed();
  if (s.action == Action::none || s.name != name || ++s.seen != s.hit) return;
  if (s.action == Action::kill) kill(getpid(), SIGKILL);
  if (s.action == Action::stop) raise(SIGSTOP);
  if (s.action == Action::sleep) usleep(50'000);
}
}  // namespace shmbuf::failpoint
#define FAILPOINT(name) ::shmbuf::failpoint::pass(#name)
#else
#define FAILPOINT(name) ((void)0)
#endif
