#!/usr/bin/env bash
# Reads what a run of the integration tests printed, and prints the table of the
# laws that each lock service kept in it, for the page of the module `lease`.
set -euo pipefail

# Sorted by suite and law; one column for each service that kept any.
sed -n 's/^test conformance::\([a-z_]*\)::\([a-z_]*\)::\([a-z0-9_]*\) \.\.\. ok$/\1 \3 \2/p' |
    LC_ALL=C sort -u |
    awk '
        {
            law = $1 " " $2
            if (!(law in seen)) { seen[law] = 1; laws[++rows] = law }
            if (!($3 in columns)) { columns[$3] = 1; services[++width] = $3 }
            kept[law, $3] = 1
        }
        END {
            # As many columns as services, in the order of their names.
            for (i = 2; i <= width; i++)
                for (j = i; j > 1 && services[j - 1] > services[j]; j--) {
                    swap = services[j]; services[j] = services[j - 1]; services[j - 1] = swap
                }
            printf "| law |"
            for (i = 1; i <= width; i++) printf " %s |", services[i]
            printf "\n|---|"
            for (i = 1; i <= width; i++) printf ":-:|"
            printf "\n"
            for (row = 1; row <= rows; row++) {
                split(laws[row], parts, " ")
                words = parts[2]
                gsub("_", " ", words)
                printf "| %s |", words
                for (i = 1; i <= width; i++)
                    printf " %s |", ((laws[row], services[i]) in kept) ? "✓" : ""
                printf "\n"
            }
        }'
