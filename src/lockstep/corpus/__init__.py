from lockstep.errors import require_text_packages

require_text_packages("lockstep.corpus")
