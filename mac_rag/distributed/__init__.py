"""Work on several processes or machines with Ray (extra `ray`)."""
