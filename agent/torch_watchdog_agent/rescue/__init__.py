"""When a rank fails all the same: what it says before its end, and how the others come free and save what is whole.

`rescuer` is the rank's half of the protocol, START HERE; `whole`, `half_step`, `replica`: whether what it holds is the whole; `gpu`, `device`, `ahead`: the
same of a state on a GPU; `sockets`: how it comes free; `saving`: how it saves. What a failed rank says: `own_failure`, `words`, `stores`, `workers`, `ending`,
`recent` with `bundle`, `evidence`. Whose script hides it, or whose process stays: `lost_peer`, `lingering`. Where a rank that waits is: `looking`, `flight`.
"""
