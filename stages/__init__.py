"""One module per stage: one typed function each, 30-120 lines.

The environment is completed here, before a stage's own imports, since libraries read it when they are imported.
"""

from pipeline.environment import quiet

quiet()
