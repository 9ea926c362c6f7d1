"""What the benches share: workloads, arrivals, a streaming client, and the figures drawn from its timings."""
