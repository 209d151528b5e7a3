"""What do the tests share? Real ranks, hosts, the command in a subprocess, and the police against leaks."""
