"""Parts of ``soak``, ``interrupts`` and ``lost_process``."""
