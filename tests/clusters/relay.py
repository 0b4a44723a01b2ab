"""A relay that delays what hosts send, for kernels without netem: ``python relay.py SECONDS HOST,PLUG...``.

It creates a pair of TAP devices for each host, in its own network namespace, and prints a line. What the first device
sends leaves the second one after the delay; what the second one receives goes to the first at once.
"""

import collections
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
TAP, NO_INFORMATION, HEADER_OF_VIRTIO = 0x2, 0x1000, 0x4000
CHECKSUM, TCP_SEGMENTS = 0x1, 0x6
HEADER_BYTES = 12
FRAME_BYTES = 65_536 + 64 + HEADER_BYTES
FRAMES_AT_ONCE = 32


def device(name):
    """A TAP device whose frames have up to 64 KB, which the kernel neither splits nor adds checksums to."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_INFORMATION | HEADER_OF_VIRTIO))
    fcntl.ioctl(tap, TUNSETVNETHDRSZ, struct.pack("i", HEADER_BYTES))
    fcntl.ioctl(tap, TUNSETOFFLOAD, CHECKSUM | TCP_SEGMENTS)
    return tap


def relay(seconds, pairs):
    """Pass frames on between the devices of pairs, until the process is killed."""
    targets = {host: (plug, seconds) for host, plug in pairs} | {plug: (host, 0) for host, plug in pairs}
    waiting = collections.deque()
    while True:
        ready = select.select(targets, (), (), max(0, waiting[0][0] - time.monotonic()) if waiting else None)[0]
        for source in ready:
            target, delay = targets[source]
            for _ in range(FRAMES_AT_ONCE):
                try:
                    frame = os.read(source, FRAME_BYTES)
                except (BlockingIOError, OSError):  # the latter before the device is up
                    break
                if delay:
                    waiting.append((time.monotonic() + delay, target, frame))
                else:
                    write(target, frame)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            write(*waiting.popleft()[1:])


def write(target, frame):
    try:
        os.write(target, frame)
    except OSError:  # the device is not up, or its queue is full: the frame is lost, as in a network
        return


if __name__ == "__main__":
    found = [tuple(map(device, pair.split(","))) for pair in sys.argv[2:]]
    os.write(1, b"ready\n")
    relay(float(sys.argv[1]), found)
