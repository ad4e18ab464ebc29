"""Play recorded programs: queues, links, memory."""
