"""The tests of plans whose devices belong to several processes: most of them need only one."""
