"""Runs over several processes and hosts on Ray: the only part of phalanx that imports it.

Ray starts processes where there is room, carries messages between hosts, and tells who died. What runs in the processes
is plain Python: `server.py`, `standby.py`, `bundle.py`.
"""
