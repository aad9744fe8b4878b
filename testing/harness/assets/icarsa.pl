#!/bin/perl
# RSA by the zcrypt device. Reads requests from standard input, one in a line, in hexadecimal, and prints a line for each:
# the result, or "error" and the reason.
#
#   me INPUT EXPONENT MODULUS            ICARSAMODEXPO
#   crt INPUT P Q DP DQ U                ICARSACRT
#
# Structures: arch/s390/include/uapi/asm/zcrypt.h of Linux.
use strict;
use warnings;

# _IOC(_IOC_READ | _IOC_WRITE, 'z', 5 and 6, 0)
my ($ICARSAMODEXPO, $ICARSACRT) = (0xc0007a05, 0xc0007a06);

# A number right-justified in a field.
sub field {
    my ($bytes, $size) = @_;
    return ("\0" x ($size - length $bytes)) . $bytes;
}

open my $device, '+<', '/dev/z90crypt' or die "/dev/z90crypt: $!\n";
while (<STDIN>) {
    my ($kind, @words) = split;
    my ($input, @key) = map { pack 'H*', $_ } @words;
    my $size = length $input;
    my $output = "\0" x $size;
    my $request = pack 'P L x4 P L x4', $input, $size, $output, $size;
    my $done;
    if ($kind eq 'me') {
        my ($exponent, $modulus) = map { field($_, $size) } @key;
        $request .= pack 'P P', $exponent, $modulus;
        $done = ioctl $device, $ICARSAMODEXPO, $request;
    } else {
        my $half = int(($size + 1) / 2);
        # These three have eight bytes more in front.
        my ($p, $dp, $u) = map { field($_, $half + 8) } @key[0, 2, 4];
        my ($q, $dq) = map { field($_, $half) } @key[1, 3];
        $request .= pack 'P P P P P', $dp, $dq, $p, $q, $u;
        $done = ioctl $device, $ICARSACRT, $request;
    }
    print $done ? unpack('H*', $output) : "error $!", "\n";
}
