"""Rewards: plain functions of the user, sync or async, in processes of their own, with a time-out and a failure class.

    def score(text, answer):
        return float(text.strip() == str(answer))

needs no import of ours. `FunctionSpec` finds it, `RewardPool` runs it, `Score` says what came of it.
"""
