"""Where workers come from: a process that has torch imported and the base models loaded, and forks (a *zygote*).

* ``__main__``: that process. It outlives the server, so that the next one's workers are there in a tenth of a second.
* ``protocol``: the messages between a server and its zygote, over a Unix socket; msgpack, nothing is pickled.
* ``handle``: the server's side.

Invariants: forked workers share the models' memory, which nothing writes to; one data directory has one zygote, whose
configuration is the server's (else it is replaced); without a server it ends by itself.

Linux and macOS only, as the server itself (its lock is fcntl's); there is no second road for others.
"""
