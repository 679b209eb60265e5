"""A Slurm task for measuring a link: the second task sends to the first, which prints bits of payload per second.

srun -w RECEIVER,SENDER --distribution=arbitrary python lab_transfer.py RECEIVER PORT
"""

from __future__ import annotations

import os
import socket
import sys
import time

WARM_UP_S, MEASURE_S = 0.5, 2.0


def receive(port: int) -> None:
    with socket.create_server(("", port)) as server:
        connection, _ = server.accept()
        with connection:
            began = time.monotonic()
            count, counting_since = 0, 0.0
            while time.monotonic() - began < WARM_UP_S + MEASURE_S:
                count += len(connection.recv(1 << 18))
                if not counting_since and time.monotonic() - began > WARM_UP_S:
                    count, counting_since = 0, time.monotonic()
            print(8 * count / (time.monotonic() - counting_since))


def send(host: str, port: int) -> None:
    for _ in range(100):
        try:
            connection = socket.create_connection((host, port), timeout=1)
            break
        except OSError:
            time.sleep(0.1)
    block = bytes(1 << 18)
    with connection:
        connection.settimeout(10)
        try:
            while True:
                connection.sendall(block)
        except OSError:
            return  # the receiver has measured long enough


if socket.gethostname() == sys.argv[1]:
    receive(int(sys.argv[2]))
else:
    send(sys.argv[1], int(sys.argv[2]))
print(f"{os.environ['SLURM_PROCID']} done", file=sys.stderr)
