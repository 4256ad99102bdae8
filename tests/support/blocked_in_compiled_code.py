"""Wait for a mutex that this thread holds: no Python handler runs, as in a blocked collective."""

import ctypes

from lockstep.runtime.signals import StopSignals

libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
with StopSignals():
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)
