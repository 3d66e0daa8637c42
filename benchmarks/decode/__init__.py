"""Parts of ``bench_decode``, some of which are processes of their own."""
