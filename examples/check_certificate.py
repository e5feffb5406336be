"""Checks a run's certificate without offbeat: python check_certificate.py RUN/certificate.json"""

import hashlib
import json
import sys


def check(path: str) -> list[str]:
    """What is wrong with a certificate; empty where every lag is within what was declared."""
    with open(path) as file:
        told = json.load(file)
    wrong = []
    digest = told.pop("digest", None)
    words = json.dumps(told, sort_keys=True).encode()
    if digest not in (None, hashlib.sha256(words).hexdigest()):
        wrong.append("the certificate has been changed or damaged")
    for line in told["stages"]:
        bound = told["declared"][line["stage"]]
        for lag, count in line["lags"].items():
            if not 0 <= int(lag) <= bound or count < 1:
                wrong.append(
                    f"stage {line['stage']}, replica {line['replica']}: {count} with lag {lag}"
                )
        if line["updates"] and not line["lags"]:
            wrong.append(f"stage {line['stage']} was updated by nothing")
    return wrong


if __name__ == "__main__":
    found = check(sys.argv[1])
    print("\n".join(found) or "every lag is within what was declared")
    sys.exit(1 if found else 0)
