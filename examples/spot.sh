#!/bin/sh
# Drain this host when its provider announces that it takes the machine away.
#
#     NOTICE=URL [NOTICE_TEXT=PATTERN] [HEADER="Name: value"] spot.sh lockstep launch ...
#
# Asks URL every five seconds. When the answer matches PATTERN (default: any text with a status of success), the agent
# gets SIGUSR1: its workers leave the run between two steps, and the others continue. Ends with the exit code of the agent.
agent=
early= # a signal came before $agent was known
trap 'if [ "$agent" ]; then kill -TERM $agent; else early=1; fi' TERM INT
"$@" & agent=$!
[ -z "$early" ] || kill -TERM $agent
(
    until curl --silent --fail --max-time 4 --header "${HEADER:-Accept: */*}" "$NOTICE" | grep -q "${NOTICE_TEXT:-.}"; do
        sleep 5
    done
    kill -USR1 $agent
) > /dev/null 2>&1 & watch=$!
wait $agent
code=$?
while kill -0 $agent 2> /dev/null; do # a signal ends `wait`, not the agent
    wait $agent
    code=$?
done
kill $watch 2> /dev/null
exit $code
