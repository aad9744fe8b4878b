//! Requests as the zcrypt driver makes them, answered and compared: with OpenSSL for keys
//! of every size, with plain integer arithmetic for small numbers, and with the errors
//! that the card would send.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

use ap::card::Coprocessor;
use ap_accel::rsa::CrtKey;
use ap_accel::{Accelerator, Error, Request};
use proptest::prelude::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<_> = text
        .bytes()
        .map(|b| (b as char).to_digit(16).unwrap() as u8)
        .collect();
    digits
        .chunks(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
}

/// Right-justified in a field.
fn field(bytes: &[u8], size: usize) -> Vec<u8> {
    let mut field = vec![0; size.checked_sub(bytes.len()).expect("fits")];
    field.extend_from_slice(bytes);
    field
}

/// The smallest modulus field for a number of bytes.
fn field_size(bytes: usize) -> usize {
    [128, 256, 512]
        .into_iter()
        .find(|size| bytes <= *size)
        .unwrap()
}

fn modular(message: &[u8], exponent: &[u8], modulus: &[u8], size: usize) -> Vec<u8> {
    let [exponent, modulus, message] = [exponent, modulus, message].map(|b| field(b, size));
    let request = Request::ModularExponentiation {
        exponent: &exponent,
        modulus: &modulus,
        message: &message,
    };
    request.to_bytes()
}

fn crt(message: &[u8], key: CrtKey<'_>, size: usize) -> Vec<u8> {
    let half = |bytes| field(bytes, size / 2);
    let CrtKey { p, q, dp, dq, u } = key;
    let [p, q, dp, dq, u] = [p, q, dp, dq, u].map(half);
    let key = CrtKey {
        p: &p,
        q: &q,
        dp: &dp,
        dq: &dq,
        u: &u,
    };
    let message = &field(message, size);
    Request::Crt { key, message }.to_bytes()
}

/// The result in a type 80 reply, or the code of a type 82 error.
fn ask(request: &[u8]) -> Result<Vec<u8>, Error> {
    let reply = Accelerator.process(request);
    match reply[1] {
        0x80 => {
            let length = usize::from(u16::from_be_bytes([reply[2], reply[3]]));
            assert_eq!((length, reply[4]), (reply.len(), 0));
            Ok(reply[16..].to_vec())
        }
        0x82 => {
            assert_eq!(reply.len(), 8);
            Err(Error(reply[4]))
        }
        other => panic!("reply of type {other:#x}"),
    }
}

#[test]
fn modexp_results_match_openssl() {
    let mut sizes = Vec::new();
    let vectors = include_str!("openssl.txt").lines();
    for line in vectors.filter(|line| !line.starts_with('#')) {
        let words: Vec<_> = line.split_whitespace().map(hex).collect();
        let [n, d, p, q, dp, dq, u, message, public, private] = &words[..] else {
            panic!("{line}");
        };
        let size = field_size(n.len());
        sizes.push(n.len() * 8);
        let e = [1, 0, 1];
        assert_eq!(ask(&modular(message, &e, n, size)), Ok(field(public, size)));
        assert_eq!(ask(&modular(message, d, n, size)), Ok(field(private, size)));
        let key = CrtKey { p, q, dp, dq, u };
        assert_eq!(ask(&crt(message, key, size)), Ok(field(private, size)));
        // And back again.
        assert_eq!(
            ask(&modular(private, &e, n, size)),
            Ok(field(message, size))
        );
    }
    assert_eq!(sizes, [512, 1000, 1024, 1536, 2048, 3072, 4096]);
}

#[test]
fn request_formats_match_driver() {
    for (size, format) in [(128, 1), (256, 2), (512, 3)] {
        let request = modular(&[2], &[3], &[9], size);
        assert_eq!(request.len(), 16 + 3 * size);
        assert_eq!(request[..2], [0, 0x50]);
        assert_eq!(request[8..10], [0, format]);
        assert_eq!(ask(&request), Ok(field(&[8], size)));
        let key = CrtKey {
            p: &[7],
            q: &[5],
            dp: &[5],
            dq: &[1],
            u: &[3],
        };
        let request = crt(&[2], key, size);
        assert_eq!(request.len(), 16 + 7 * size / 2);
        assert_eq!(request[8..10], [0, 0x10 | format]);
        // 2^5 mod 35.
        assert_eq!(ask(&request), Ok(field(&[32], size)));
    }
}

#[test]
fn malformed_message_gets_specific_error() {
    let good = modular(&[2], &[3], &[9], 128);
    let with = |at: usize, byte: u8| {
        let mut bad = good.clone();
        bad[at] = byte;
        ask(&bad)
    };
    assert_eq!(with(1, 0x06), Err(Error::MESSAGE_TYPE));
    assert_eq!(with(3, 0), Err(Error::MESSAGE_LENGTH));
    assert_eq!(with(9, 4), Err(Error::FORMAT));
    assert_eq!(with(8, 1), Err(Error::FORMAT));
    assert_eq!(with(9, 0x21), Err(Error::FORMAT));
    assert_eq!(
        with(9, 2),
        Err(Error::MESSAGE_LENGTH),
        "another format's length"
    );
    for reserved in [0, 4, 6, 7, 10, 15] {
        assert_eq!(with(reserved, 1), Err(Error::RESERVED_FIELD));
    }
    assert!(with(5, 0xff).is_ok(), "this byte is ignored");
    assert_eq!(ask(&good[..100]), Err(Error::MESSAGE_LENGTH));
    assert_eq!(ask(&[]), Err(Error::MESSAGE_LENGTH));
}

#[test]
fn invalid_operands_get_specific_error() {
    let ask = |message: u8, exponent: u8, modulus: u8| {
        ask(&modular(&[message], &[exponent], &[modulus], 128))
    };
    assert_eq!(ask(2, 3, 8), Err(Error::EVEN_MODULUS));
    for modulus in [0, 1] {
        assert_eq!(ask(0, 3, modulus), Err(Error::OPERAND_INVALID));
    }
    assert_eq!(
        ask(9, 3, 9),
        Err(Error::OPERAND_INVALID),
        "not below the modulus"
    );
    assert_eq!(ask(2, 0, 9), Err(Error::OPERAND_INVALID), "no exponent");
    assert_eq!(ask(0, 3, 9), Ok(vec![0; 128]));
}

fn crt_of(p: u8, q: u8, u: u8, message: u8) -> Result<Vec<u8>, Error> {
    let key = CrtKey {
        p: &[p],
        q: &[q],
        dp: &[5],
        dq: &[1],
        u: &[u],
    };
    ask(&crt(&[message], key, 128))
}

#[test]
fn invalid_crt_operands_get_specific_error() {
    assert_eq!(crt_of(8, 5, 3, 2), Err(Error::EVEN_MODULUS));
    assert_eq!(crt_of(7, 4, 3, 2), Err(Error::EVEN_MODULUS));
    assert_eq!(crt_of(7, 1, 3, 2), Err(Error::OPERAND_INVALID));
    assert_eq!(
        crt_of(7, 5, 7, 2),
        Err(Error::OPERAND_INVALID),
        "u not below p"
    );
    assert_eq!(crt_of(7, 5, 3, 35), Err(Error::OPERAND_INVALID));
    assert!(crt_of(7, 5, 3, 34).is_ok());
}

fn naive(mut base: u128, mut exponent: u64, modulus: u128) -> u128 {
    let mut result = 1 % modulus;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = result * base % modulus;
        }
        base = base * base % modulus;
        exponent >>= 1;
    }
    result
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn modexp_of_small_numbers_matches_naive_result(message: u64, exponent in 1..=u64::MAX, modulus in 2..=u64::MAX) {
        let modulus = modulus | 1;
        let message = message % modulus;
        let got = ask(&modular(
            &message.to_be_bytes(),
            &exponent.to_be_bytes(),
            &modulus.to_be_bytes(),
            128,
        ));
        let want = naive(message.into(), exponent, modulus.into());
        prop_assert_eq!(got, Ok(field(&want.to_be_bytes(), 128)));
    }

    /// Whatever a guest sends, there is a reply, and it fits the driver's buffer.
    #[test]
    fn random_bytes_get_reply_within_buffer(
        format in prop::sample::select(&[1_u8, 2, 0x11, 0x12][..]),
        seed in prop::collection::vec(any::<u8>(), 1..64),
        sparse in any::<bool>(),
        cut in 0..4000_usize,
    ) {
        let size = if format & 0xf == 1 { 128 } else { 256 };
        let mut request = match format >> 4 {
            0 => modular(&[], &[], &[], size),
            _ => crt(&[], CrtKey { p: &[], q: &[], dp: &[], dq: &[], u: &[] }, size),
        };
        for (i, byte) in request.iter_mut().skip(16).enumerate() {
            *byte = if sparse && i % 64 < 60 { 0 } else { seed[i % seed.len()] };
        }
        request.truncate(cut);
        let reply = Accelerator.process(&request);
        prop_assert!(reply.len() <= 0x210 && [0x80, 0x82].contains(&reply[1]));
    }
}

#[test]
fn crt_with_primes_of_different_lengths_matches_modexp() {
    // Both are prime; each is the longer one once.
    let (short, long) = (65_537_u128, (1_u128 << 89) - 1);
    for (p, q) in [(short, long), (long, short)] {
        let inverse = |a: u128, m: u128| {
            // Extended Euclid.
            let (mut r, mut s) = ((m as i128, (a % m) as i128), (0_i128, 1_i128));
            while r.1 != 0 {
                let quotient = r.0 / r.1;
                r = (r.1, r.0 - quotient * r.1);
                s = (s.1, s.0 - quotient * s.1);
            }
            s.0.rem_euclid(m as i128) as u128
        };
        let [n, d, message] = [p * q, 5, 123_456_789_012_345].map(u128::to_be_bytes);
        let [p_bytes, q_bytes, u] = [p, q, inverse(q, p)].map(u128::to_be_bytes);
        let key = CrtKey {
            p: &p_bytes,
            q: &q_bytes,
            dp: &d,
            dq: &d,
            u: &u,
        };
        let want = ask(&modular(&message, &d, &n, 128));
        assert!(want.is_ok());
        assert_eq!(ask(&crt(&message, key, 128)), want);
    }
}
