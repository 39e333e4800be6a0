"""Walks on a ring of letters to the goal 'a', for the randomwalks programs."""

NODES = 'abcdef'


def step_is_edge(here, there):
    return abs(NODES.index(here) - NODES.index(there)) in (1, len(NODES) - 1)


def generate_walks():
    """Returns (metric function, start letters, walks)."""
    walks = []
    for start in NODES[1:]:
        for direction in (1, -1):
            at, walk = NODES.index(start), start
            while walk[-1] != 'a':
                at = (at + direction) % len(NODES)
                walk += NODES[at]
            walks.append(walk)

    def metric_fn(samples):
        optimality = []
        for sample in samples:
            shortest = min(NODES.index(sample[0]), len(NODES) - NODES.index(sample[0])) + 1
            walk = sample.split('a')[0] + 'a' if 'a' in sample else ''
            fine = all(c in NODES for c in walk) and all(step_is_edge(x, y) for x, y in zip(walk, walk[1:]))
            optimality.append(shortest / len(walk) if walk and fine else 0.0)
        return {'optimality': optimality}

    return metric_fn, list(NODES[1:]), walks
