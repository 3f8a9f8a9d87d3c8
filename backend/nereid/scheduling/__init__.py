"""What the scheduler is made of: requests' states, tenants and their queues, shares, the plan of a step."""
