/* An edit of one row of two bytes against readers (native/edits.h). Writer: plan sealed; edit_word odd; stripe odd; bytes; commit; stripe even; edit_word even; head passes the record.
   It may be killed anywhere; a successor finds the sealed plan, or what was committed and not settled. The row is edited twice: 0 0, 1 1, 2 2. Readers may stop for ever between two steps of the writer:
   who finds the stripe odd composes the row out of its bytes and the record's (E4). A reader that starts after another returned the new row must not return the old one.
   -DVERSIONS: the second edit is for older rows only, and the row is not older: the planner takes its id out of the record before it seals the plan, and nobody may ever return it.
   Memory is sequentially consistent here; the fences are the matter of TSan over the driver.
   Mutants: -DNORAISE (edit_word is not raised), -DNOSTRIPE (the stripe is not), -DEVENEARLY (evened before the bytes), -DHALF (a reader takes the bytes as they are where the stripe is odd),
   -DMARKLATE (with -DVERSIONS: compared when the edit is applied) */
#ifdef MARKLATE
#define VERSIONS
#endif
#ifdef VERSIONS
#define PASSED_OVER(edit) (edit == 2 && marked)
#else
#define PASSED_OVER(edit) false
#endif
#ifndef KILLS
#define KILLS 1
#endif
#define ODD(x) ((x) % 2)
byte word, stripe, row[2], planned, commit, done, head = 1; /* commit: edits done; planned: the edit sealed; head: whose record lies in the ring */
bool marked;                                          /* the second edit's record has no id any more */
byte role, kills = KILLS, returned;
inline step(me) {                                     /* one action of the holder of the role, or its death */
  if
  :: kills > 0 -> kills--; role = 0; goto dead
  :: true
  fi
}
inline settle() {
     if :: ODD(stripe) -> stripe++ :: else fi; step(0);
     if :: ODD(word) -> word++ :: else fi; step(0);
     atomic { done = commit; head = commit + 1 }
}
proctype Writer() {
dead: do
  :: commit == 2 && done == 2 -> break
  :: atomic { role == 0 -> role = 1 };
     if :: done < commit ->
           settle()
        :: else fi;
     if :: commit < 2 ->
#if defined(VERSIONS) && !defined(MARKLATE)
           if :: commit == 1 -> marked = true; step(0) :: else fi;
#endif
           planned = commit + 1; step(0);
#ifndef NORAISE
           if :: !ODD(word) -> word++ :: else fi; step(0);
#endif
#ifndef NOSTRIPE
           if :: !ODD(stripe) -> stripe++ :: else fi; step(0);
#endif
#ifdef EVENEARLY
           if :: ODD(stripe) -> stripe++ :: else fi;
           if :: ODD(word) -> word++ :: else fi;
#endif
#ifdef MARKLATE
           if :: planned == 2 -> marked = true; step(0) :: else fi;
#endif
           if :: PASSED_OVER(planned)
              :: else -> row[0] = planned; step(0); row[1] = planned; step(0)
           fi;
           commit = planned; step(0);
           settle()
        :: else fi;
     role = 0
  od
}
proctype Reader() { byte a, b, w, s, c, before, reads, tries; bool ok;
again: before = returned; tries = 0;
  w = word; a = row[0]; b = row[1];
  ok = (!ODD(w) && word == w);
  do :: ok -> break
     :: !ok && tries < 2 -> tries++;
        s = stripe; c = commit;
        a = row[0]; b = row[1];
#ifndef HALF
        if :: ODD(s) && planned == c + 1 && done == c -> atomic { if :: head == planned && !PASSED_OVER(planned) -> a = planned; b = planned :: else fi }   /* the record: whole until head passes it */
           :: else fi;
#endif
        ok = (stripe == s && (!ODD(s) || commit == c))
     :: !ok && tries == 2 -> goto lapped
  od;
  assert(a == b);
  assert(a >= before);
#ifdef VERSIONS
  assert(a < 2);
#endif
  atomic { if :: a > returned -> returned = a :: else fi };
lapped: a = 0; b = 0; w = 0; s = 0; c = 0; ok = false; reads++;
  if :: reads < 2 -> goto again :: else fi
}
init { atomic { run Writer(); run Reader();
#ifdef TWO
  run Reader();
#endif
} }
