"""Keep a run alive, end it with a reason when it cannot go on, and explain afterwards what happened."""
