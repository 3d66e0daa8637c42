"""The part of ``bench_exec`` that runs in several processes."""
