"""What a job will take, before it is launched: memory, bytes sent, idle time. Nothing is allocated, nothing is sent."""
