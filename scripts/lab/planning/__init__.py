"""What a deployment will do before it is paid for: memory, speed and cost, counted, estimated or compiled."""
