"""Control policies: environments that step, trajectories, and updates by PPO, as pure functions of tensors.

    environments  a group of environments by registered id; its state is seeds and actions
    spaces        observations to rows, columns to actions
    distributions what a policy's outputs say about actions
    normalise     running moments of observations and of discounted returns
    rollout       policy + state -> trajectory + state
    evaluate      policy -> returns of whole episodes
    gae, ppo      trajectories -> new weights

Invariant: nothing depends on which worker computes, on what it computed before, or on the order of groups.
"""
