"""Plans whose devices belong to several processes, on one host or on several.

``compiler`` has the processes of a ``meeting`` agree on the plan and on who owns which device (``members``), and on the
transport of their messages (``process_transport``). All have the same programs, of which ``distributed`` runs a
process's part: ``rounds`` divides a program into what each process copies, adds and sends, and ``transport`` carries
messages with torch.distributed. Where each process has one GPU of a host, ``peers`` runs exchanges by kernels:
``shared`` opens the memory of other processes (``ipc``), and ``mirrors`` stand in for their tensors.

What processes tell each other is ``plain_data``, which ``telling`` checks. ``agreement`` lets all go on only if all did
the same, and ``lost`` finds the first cause where torch.distributed fails.
"""
