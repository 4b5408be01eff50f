"""What to learn and how: tasks, rewards, trainers. They run where the user is, and ask a service for the rest.

Language models, over the public tinker SDK alone: on any such service
    trainer         what all share: the run, its checkpoints, the log folder; training_loop: one call of fit
    sft, dpo, reward_model, distill, rl    one trainer each; pairs and pair_trainer: what two of them share
    rl_variants     grpo and its relatives by name; policy_batch, critic: groups of episodes as a loss's rows
    collect         episodes from a sampling client, scored; rollouts/ producer, store, advantages, corrections
    datums          tokens as the SDK's Datum; overlong, log_folder, stopping: what is left out, kept, and when it ends
    tasks/          a training as a TOML file, as Python, as a manifest
    addition        the quickstart's task

Everything else, over gradserve's own extensions
    ppo             control policies: PPOTrainer
    fit             any algorithm on any module or language model
    actor_critic    a user's policy becomes what PPO trains
    environments    where a policy acts: on the server, or here
    ppo_settings    keywords over an environment's defaults; schedules change them while training goes on
    learner         what fit trains: module_learner, language_learner
    optimizers      by torch's names, with torch's defaults
    weights         tensors as bytes and back; progress: a line at a terminal
"""
