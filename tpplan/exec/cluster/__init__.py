"""Plans whose devices belong to several processes, on one host or on several.

``compiler`` has the processes agree on the plan and on who owns which device (``members``). Every process has the same
programs; ``rounds`` divides one into what each process copies, adds and sends, ``processes`` runs its part, and
``carrier`` carries messages from process to process with torch.distributed.
"""
