# The rule that payouts.csv was made by:  awk -f payouts.awk > payouts.csv
#
# 1,200 payouts over 40 accounts, amounts in minor units, and among them some lines that are wrong
# in one way each. No random numbers, so that the file comes out the same everywhere.
BEGIN {
    print "id,account,amount"
    for (n = 1; n <= 1200; n++) {
        account = n * 7 % 40 + 1
        amount = 100 + n * 7919 % 250000
        printf "pay-%04d,acct-%02d,%d\n", n, account, amount
        if (n == 57)   print "pay-9001,acct-03,12.50"                # not whole minor units
        if (n == 131)  print "pay-9002,acct-11,twelve"               # not a number
        if (n == 208)  print "pay-9003,acct-17,-4500"                # negative
        if (n == 333)  print "pay-9004,acct-22,0"                    # nothing
        if (n == 402)  print "pay-9005,acct-08"                      # a column too few
        if (n == 518)  print "pay-9006,acct-08,1200,EUR"             # a column too many
        if (n == 640)  print "pay-0613,acct-12,99"                   # an id of before, another payout
        if (n == 701)  print "pay-9007,acct-31,99999999999999999999" # too large for 64 bits
        if (n == 812)  print "pay-9008,acct-31,9000000000000000000"  # fits, but its sums would not
        if (n == 905)  print " ,acct-02,1000"                        # no id
        if (n == 1033) print "pay-9009,acct-77,1000"                 # no such account
        if (n == 1110) print "pay-9010,,1000"                        # no account
    }
}
