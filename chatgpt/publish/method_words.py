"""What a model card says of each method: its name, what it optimises, and whose it is."""

from __future__ import annotations

from typing import NamedTuple

LIBRARY = 'chatgpt-rlhf'


class Paper(NamedTuple):
    """What is cited."""

    author: str
    """the first, as BibTeX has names"""
    year: int
    title: str
    arxiv: str

    @property
    def url(self) -> str:
        return f'https://arxiv.org/abs/{self.arxiv}'

    @property
    def shown(self) -> str:
        return f'[{self.author.partition(",")[0]} et al. {self.year}]({self.url})'

    @property
    def bibtex(self) -> str:
        key = f'{self.author.partition(",")[0].lower().replace(" ", "")}{self.year}'
        return (
            f'@article{{{key},\n'
            f'  title = {{{{{self.title}}}}},\n'
            f'  author = {{{self.author} and others}},\n'
            f'  journal = {{arXiv preprint arXiv:{self.arxiv}}},\n'
            f'  year = {{{self.year}}},\n'
            f'  url = {{{self.url}}}\n}}'
        )


class MethodWords(NamedTuple):
    """A method as a card names it. `kind`: reward, demonstrations, preferences, labels, scores (offline)."""

    name: str
    what: str
    paper: Paper | None
    kind: str


_REWARD = 'responses are drawn from the model itself, and made likelier as their score is higher'


def _online(name: str, how: str, paper: Paper) -> MethodWords:
    return MethodWords(name, f'{_REWARD}; {how}', paper, 'reward')


METHOD_WORDS: dict[str, MethodWords] = {
    'sft': MethodWords(
        'supervised fine-tuning',
        'the model learns to continue as the demonstrations do',
        Paper(
            'Ouyang, Long', 2022, 'Training language models to follow instructions with human feedback', '2203.02155'
        ),
        'demonstrations',
    ),
    'reward-model': MethodWords(
        'a reward model',
        'the model learns a score that is higher for the answer that was preferred',
        Paper('Stiennon, Nisan', 2020, 'Learning to summarize from human feedback', '2009.01325'),
        'scores',
    ),
    'ppo': _online(
        'PPO',
        'a learned critic says what was to be expected, and the step is clipped',
        Paper('Schulman, John', 2017, 'Proximal Policy Optimization Algorithms', '1707.06347'),
    ),
    'grpo': _online(
        'GRPO',
        'what was to be expected is the mean of the other responses to the prompt, in units of their spread',
        Paper(
            'Shao, Zhihong',
            2024,
            'DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models',
            '2402.03300',
        ),
    ),
    'dr_grpo': _online(
        'Dr. GRPO',
        'what was to be expected is the mean of the other responses to the prompt, without normalisers',
        Paper('Liu, Zichen', 2025, 'Understanding R1-Zero-Like Training: A Critical Perspective', '2503.20783'),
    ),
    'gdpo': _online(
        'GDPO',
        'each of several rewards is normalised within the group before they are added',
        Paper(
            'Liu, Shih-Yang',
            2026,
            'GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization',
            '2601.05242',
        ),
    ),
    'rloo': _online(
        'RLOO',
        'what was to be expected is the mean of the other responses to the prompt',
        Paper(
            'Ahmadian, Arash',
            2024,
            'Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs',
            '2402.14740',
        ),
    ),
    'reinforce++': _online(
        'REINFORCE++',
        'what was to be expected is the mean of the whole batch',
        Paper(
            'Hu, Jian',
            2025,
            'REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models',
            '2501.03262',
        ),
    ),
    'reinforce++_baseline': _online(
        'REINFORCE++ with a baseline',
        'what was to be expected is the mean of the responses to the prompt, and the spread that of the batch',
        Paper(
            'Hu, Jian',
            2025,
            'REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models',
            '2501.03262',
        ),
    ),
    'dapo': _online(
        'DAPO',
        'GRPO with a wider clip upwards, prompts whose responses differ, and a mean over tokens',
        Paper('Yu, Qiying', 2025, 'DAPO: An Open-Source LLM Reinforcement Learning System at Scale', '2503.14476'),
    ),
    'gspo': _online(
        'GSPO',
        'the clipped ratio is that of whole responses',
        Paper('Zheng, Chujie', 2025, 'Group Sequence Policy Optimization', '2507.18071'),
    ),
    'cispo': _online(
        'CISPO',
        'the weight of a token is clipped, and not its update',
        Paper(
            'MiniMax',
            2025,
            'MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention',
            '2506.13585',
        ),
    ),
    'a2c': _online(
        'A2C',
        'a learned critic says what was to be expected, and there is one step for each response',
        Paper('Mnih, Volodymyr', 2016, 'Asynchronous Methods for Deep Reinforcement Learning', '1602.01783'),
    ),
    'nlpo': _online(
        'NLPO',
        'PPO in which a copy of the policy leaves out the unlikely tokens',
        Paper(
            'Ramamurthy, Rajkumar',
            2022,
            'Is Reinforcement Learning (Not) for Natural Language Processing: Benchmarks, Baselines, and Building '
            'Blocks for Natural Language Policy Optimization',
            '2210.01241',
        ),
    ),
    'rft': MethodWords(
        'rejection-sampling fine-tuning',
        'responses are drawn from the model itself, and it learns to continue as the best-scored of them do',
        Paper(
            'Dong, Hanze',
            2023,
            'RAFT: Reward rAnked FineTuning for Generative Foundation Model Alignment',
            '2304.06767',
        ),
        'reward',
    ),
    'dpo': MethodWords(
        'DPO',
        'the chosen answer is made likelier than the rejected one, relative to the initial model',
        Paper(
            'Rafailov, Rafael',
            2023,
            'Direct Preference Optimization: Your Language Model is Secretly a Reward Model',
            '2305.18290',
        ),
        'preferences',
    ),
    'kto': MethodWords(
        'KTO',
        'good answers are made likelier and bad ones less likely, relative to the initial model',
        Paper('Ethayarajh, Kawin', 2024, 'KTO: Model Alignment as Prospect Theoretic Optimization', '2402.01306'),
        'preferences',
    ),
    'orpo': MethodWords(
        'ORPO',
        'the model learns to continue as the chosen answers do, and the odds of the rejected ones are lowered',
        Paper('Hong, Jiwoo', 2024, 'ORPO: Monolithic Preference Optimization without Reference Model', '2403.07691'),
        'preferences',
    ),
    'simpo': MethodWords(
        'SimPO',
        'the chosen answer is made likelier than the rejected one, per token and by a margin',
        Paper('Meng, Yu', 2024, 'SimPO: Simple Preference Optimization with a Reference-Free Reward', '2405.14734'),
        'preferences',
    ),
    'ilql': MethodWords(
        'ILQL',
        'values of tokens are learned from texts with rewards, and nothing is drawn while learning',
        Paper(
            'Snell, Charlie',
            2022,
            'Offline RL for Natural Language Generation with Implicit Language Q Learning',
            '2206.11871',
        ),
        'labels',
    ),
}
"""by the names of the library's table of methods, and of relatives that are not in it"""
