"""What to learn and how: tasks, rewards, trainers. They run where the user is, and ask a service for the rest.

grpo, addition   language models by reinforcement, over the public tinker SDK alone: on any such service
ppo              control policies: PPOTrainer
fit              any algorithm on any module or language model

actor_critic     a user's policy becomes what PPO trains
environments     where a policy acts: on the server, or here
ppo_settings     keywords over an environment's defaults; schedules change them while training goes on
learner          what fit trains: module_learner, language_learner
optimizers       by torch's names, with torch's defaults
weights          tensors as bytes and back; progress: a line at a terminal
"""
