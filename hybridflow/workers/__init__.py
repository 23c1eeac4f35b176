"""The roles: actor, critic, reference, reward, cost, rollout; `worker.place` makes a group of any class."""
