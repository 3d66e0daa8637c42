"""Plans whose devices belong to several processes, on one host or on several.

``compiler`` has the processes of a :mod:`tpplan.exec.group` agree on the plan, on who owns which device, and on the
transport of their messages (``process_transport``). All have the same programs, of which ``distributed`` runs a
process's part: ``rounds`` divides a program into what each process copies, adds and sends. Where each process has one
GPU of a host, ``peers`` runs exchanges by kernels: ``shared`` opens the memory of other processes (``ipc``), and
``presence`` sees which of them are lost. ``agreement`` lets all go on only if all did the same.
"""
