"""A replay buffer with batches drawn ahead at the end of the interpreter: who still samples gets batches."""

import subprocess
import sys

SCRIPT = """
import atexit, threading, torch
from tensordict import TensorDict
from shmbuf import ShmStorage, TensorDictReplayBuffer
rb = TensorDictReplayBuffer(storage=ShmStorage(100), batch_size=4, prefetch=3)
rb.extend(TensorDict({"k": torch.arange(50)}, [50]))
ended = threading.Event()
def work():
    rb.sample()
    threading.main_thread().join()
    print("thread", sum(len(rb.sample()) for _ in range(20)), flush=True)
threading.Thread(target=work).start()
atexit.register(lambda: print("atexit", len(rb.sample()), flush=True))
rb.sample()
"""


def test_threads_and_exit_handlers_still_sample():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.split() == ["thread", "80", "atexit", "4"]
