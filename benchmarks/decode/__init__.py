"""Parts of ``bench_decode`` and ``profile_decode``, some of which are processes of their own."""
