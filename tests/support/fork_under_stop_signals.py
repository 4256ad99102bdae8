"""Receive signals and fork under StopSignals, and check that everything is restored."""

import os
import signal
import threading
import time

from lockstep.runtime.signals import STOP_SIGNALS, StopSignals

before = [signal.getsignal(number) for number in STOP_SIGNALS]
descriptors = len(os.listdir("/proc/self/fd"))
with StopSignals() as signals:
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(1)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
assert signals.received == "SIGUSR1", signals.received
assert before == [signal.getsignal(number) for number in STOP_SIGNALS]
assert threading.active_count() == 1
assert descriptors == len(os.listdir("/proc/self/fd"))
assert signal.set_wakeup_fd(-1) == -1
print("done")
