"""How much memory there is, and how much of it is taken. Reads what the system says; owns nothing."""
