"""Moves KV blocks between two workers' memories, and never lets a wrong, stale or half-written block through.

Where things live::

    memory     our own registered memory: 64-byte aligned buffers, the scratch cells that slot reads land in
    layout     which two workers fit together (format, geometry), names and units of regions
    ranks      which heads and layers a rank holds, which ranks another one reads; pure
    plan       the blocks of a sequence at two ranks -> copies, by logical coordinates; pure
    copies     many copies as one array: sorted, merged, cut into chunks; pure
    digest     wsum64 / crc32 per (block, kv head) of the source, made again at D whatever its geometry
    slot       the 64 bytes of a lease slot: how they are written at P and read at D
    lease      P side: who may read which blocks until when
    custody    D side: blocks that an operation may still write to
    validate   D side: accept what was read, or say why not
    session    D side: one fetch as a sans-I/O state machine
    peers      at most one usable incarnation of each worker
    canary     bytes that are known, read before anything of worth is
    probe      one link measured over a canary
    choice     which link of a pair is used; pure
    handshake  from a peer's word to a link in use
    circuit    a pair that keeps failing is left alone for a while; sans-I/O
    pairs      what became of each pair: counters, circuits
    quarantine when blocks in custody that nobody waits for are an alarm; pure
    work       one fetch as the loop keeps it
    transfer_loop     sessions and links, one turn at a time
    transfer_thread   the one thread that owns a backend
    backends/  what really moves the bytes: one-sided (nixl, inproc for tests) or sent by the owner (tcp)

The control messages are frozen dataclasses of ``core.handoff``; carrying them is the workers' job.
"""
