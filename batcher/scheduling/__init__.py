"""Which requests run, wait and give way, with their slots and pages; the plan of the next step."""
