/* A pin against the writer's T1 (native/pins.h). N slots of one byte. Owner: claims, looks twice, may help, releases or dies. Writer: plans around the pins; R.store; fence; looks again; overwrites.
   A pin in the way: nothing is written, the plan stays sealed, the role is given back; R goes back if this very call had raised it and no byte was written.
   The writer may die at its first byte; whoever raised R then is not known any more, and it stays (-DLOWERALWAYS: whoever meets the pin lowers it). A dead owner's byte is free (alive = false): its pin is removed by whoever holds the role.
   -DREVOKE: a living pin may be revoked at any planning; its owner trusts what it read only if the pin is still there afterwards.
   Mutants: -DNOFENCE (looks only before R is raised), -DP1LATE (the owner looks at R before its word is stored), -DWAITIN (waits inside the transaction, holding the role: its own pin's owner helps and deadlocks),
            -DREVOKE -DBLIND (the owner does not ask afterwards), -DREVOKE -DLATEREVOKE (revoked only after the bytes) */
#define N 2
#define NONE 255
byte R = N, C = N, pin = NONE, role, row[N]; bool alive = true, sealed; byte crash = 1, wcrash = 1;
#define CONFLICT(id) (pin != NONE && pin + N < (id) + 1)
inline sweep() { if :: atomic { !alive && pin != NONE -> pin = NONE } :: else fi }
inline write1(me) {                                              /* one transaction of one row */
  cf = false; rv = false;
  if :: atomic { role == 0 -> role = me } ->
        id = C; sweep();
        if :: sealed -> skip
           :: else ->
#ifdef REVOKE
              if :: CONFLICT(id) ->
#ifdef LATEREVOKE
                    rv = true
#else
                    atomic { if :: pin != NONE -> pin = NONE :: else fi }
#endif
                 :: true fi;
#endif
              if :: CONFLICT(id) && !rv -> cf = true :: else -> sealed = true fi
        fi;
        if :: !cf ->
#ifdef NOFENCE
              if :: CONFLICT(id) && !rv -> cf = true :: else fi;
#endif
              was = R;
              R = (R < id + 1 -> id + 1 : R);                    /* T1; fence */
#ifdef WAITIN
              (!CONFLICT(id) || !alive);
#endif
#ifndef NOFENCE
              if :: CONFLICT(id) && !rv -> cf = true;
#ifdef LOWERALWAYS
                    R = id
#else
                    if :: was < id + 1 -> R = was :: else fi
#endif
                 :: else fi;
#endif
              if :: !cf ->
                    if :: me == 1 && wcrash > 0 -> wcrash--; row[id % N] = 200; role = 0; goto back   /* killed in the middle of the row; the kernel drops the role */
                       :: row[id % N] = id; C = id + 1; sealed = false fi
                 :: else fi;
              if :: rv -> pin = NONE :: else fi
           :: else fi;
        role = 0;
back:   skip
#ifndef WAITIN
     :: role != 0
#endif
  fi
}
proctype Writer() { byte id, was; bool cf, rv;
  do :: C < 5 -> write1(1) :: else -> break od }
proctype Owner() { byte id, lo, v, w, was; bool cf, rv, held; byte tries;
  do :: tries < 2 -> tries++;
     lo = (R > N -> R - N : 0);
#ifdef P1LATE
     held = !(lo + N < R); pin = lo;
#else
     pin = lo; held = !(lo + N < R);                             /* P1 */
#endif
     if :: !held -> pin = NONE                                   /* Lapped */
        :: else ->
           if :: lo < C ->
                 v = row[lo % N]; w = row[lo % N];
#if defined(REVOKE) && !defined(BLIND)
                 if :: pin == lo -> assert(v == lo && w == lo) :: else fi
#else
                 assert(v == lo && w == lo)
#endif
              :: else fi;
           if :: write1(2) :: true fi;                           /* whoever waits may help, its own pin in place */
           if :: atomic { pin == lo -> pin = NONE } :: else
              :: atomic { crash > 0 -> crash--; alive = false; goto out } fi
     fi
     :: else -> break
  od;
out: skip
}
init { atomic { row[0] = 0; row[1] = 1; run Writer(); run Owner() } }
