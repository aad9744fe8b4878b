//! Diffie-Hellman groups of RFC 7919, with the generator 2, and the null group.

use crate::random::EXPONENT;
use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};
use zeroize::Zeroize;

/// A Diffie-Hellman group identifier ("NVMe Base 2.1", 8.3.5.5.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// No Diffie-Hellman exchange.
    Null,
    /// ffdhe2048.
    Ffdhe2048,
    /// ffdhe3072.
    Ffdhe3072,
    /// ffdhe4096.
    Ffdhe4096,
    /// ffdhe6144.
    Ffdhe6144,
    /// ffdhe8192.
    Ffdhe8192,
}

impl Group {
    /// All groups in order of preference: the smallest secure group is first, because a step of the
    /// largest takes a hundred times as long.
    pub const ALL: [Group; 6] = [
        Group::Ffdhe2048,
        Group::Ffdhe3072,
        Group::Ffdhe4096,
        Group::Ffdhe6144,
        Group::Ffdhe8192,
        Group::Null,
    ];

    /// Returns the group with this identifier.
    pub const fn of(id: u8) -> Option<Self> {
        Some(match id {
            0 => Self::Null,
            1 => Self::Ffdhe2048,
            2 => Self::Ffdhe3072,
            3 => Self::Ffdhe4096,
            4 => Self::Ffdhe6144,
            5 => Self::Ffdhe8192,
            _ => return None,
        })
    }

    /// Returns the identifier.
    pub const fn id(self) -> u8 {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 1,
            Self::Ffdhe3072 => 2,
            Self::Ffdhe4096 => 3,
            Self::Ffdhe6144 => 4,
            Self::Ffdhe8192 => 5,
        }
    }

    /// Returns the size of a public value in bytes: 0 for [`Group::Null`].
    pub(crate) const fn len(self) -> usize {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 256,
            Self::Ffdhe3072 => 384,
            Self::Ffdhe4096 => 512,
            Self::Ffdhe6144 => 768,
            Self::Ffdhe8192 => 1024,
        }
    }

    /// Returns whether this is the null group.
    pub const fn is_null(self) -> bool {
        matches!(self, Self::Null)
    }

    /// Returns the prime, big-endian: `2^b - 2^(b - 64) + ([2^(b - 130) e] + X) 2^64 - 1` (RFC
    /// 7919, A).
    fn prime(self) -> Vec<u8> {
        let x: u32 = match self {
            Self::Null => return Vec::new(),
            Self::Ffdhe2048 => 560_316,
            Self::Ffdhe3072 => 2_625_351,
            Self::Ffdhe4096 => 5_736_041,
            Self::Ffdhe6144 => 15_705_020,
            Self::Ffdhe8192 => 10_965_728,
        };
        // The first and last 64 bits are ones. Between them are the first digits of e, to which X
        // is added; the last ones take 1 from it.
        let digits = E.as_bytes().chunks_exact(2).take(self.len() - 16);
        let mut middle: Vec<u8> = digits
            .map(|pair| {
                pair.iter()
                    .fold(0, |byte, digit| byte << 4 | nibble(*digit))
            })
            .collect();
        let mut carry = x - 1;
        for byte in middle.iter_mut().rev() {
            carry += u32::from(*byte);
            *byte = carry as u8;
            carry >>= 8;
        }
        let ones = [0xff; 8];
        [&ones, middle.as_slice(), &ones].concat()
    }

    fn params(self) -> Option<BoxedMontyParams> {
        let prime = self.prime();
        let number = BoxedUint::from_be_slice(&prime, bits(&prime)).ok()?;
        let odd: Option<Odd<BoxedUint>> = number.to_odd().into();
        // The time of this call depends on the prime, which is public.
        Some(BoxedMontyParams::new_vartime(odd?))
    }

    /// Returns the public value for an exponent; empty for [`Group::Null`].
    pub(crate) fn public(self, exponent: &[u8; EXPONENT]) -> Vec<u8> {
        let generator = self.len().checked_sub(1).map(|zeros| {
            let mut bytes = vec![0; zeros];
            bytes.push(2);
            bytes
        });
        generator
            .and_then(|two| self.power(&two, exponent))
            .unwrap_or_default()
    }

    /// Returns the session key from the other side's public value; `None` if that value is invalid.
    pub(crate) fn shared(self, public: &[u8], exponent: &[u8; EXPONENT]) -> Option<Vec<u8>> {
        if public.len() != self.len() || self.is_null() {
            return None;
        }
        // The values 0, 1 and p - 1 lead to a key that anybody can guess.
        let number = BoxedUint::from_be_slice(public, bits(public)).ok()?;
        let prime = self.prime();
        let prime = BoxedUint::from_be_slice(&prime, bits(&prime)).ok()?;
        let one = BoxedUint::one_with_precision(number.bits_precision());
        if number <= one || number >= prime.wrapping_sub(&one) {
            return None;
        }
        self.power(public, exponent)
    }

    /// Computes the modular power in a time that does not depend on the exponent.
    fn power(self, base: &[u8], exponent: &[u8; EXPONENT]) -> Option<Vec<u8>> {
        let params = self.params()?;
        let base = BoxedUint::from_be_slice(base, params.bits_precision()).ok()?;
        let length = bits(exponent);
        let mut exponent = BoxedUint::from_be_slice(exponent, length).ok()?;
        let mut power = BoxedMontyForm::new(base, &params)
            .pow_bounded_exp(&exponent, length)
            .retrieve();
        exponent.zeroize();
        let bytes = power.to_be_bytes();
        power.zeroize();
        let from = bytes.len().checked_sub(self.len())?;
        bytes.get(from..).map(<[u8]>::to_vec)
    }
}

fn bits(bytes: &[u8]) -> u32 {
    // A prime's are the most.
    bytes.len() as u32 * 8
}

const fn nibble(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => digit - b'a' + 10,
    }
}

/// First 8064 bits of e in hexadecimal, two of them before the binary point.
const E: &str = "\
    adf85458a2bb4a9aafdc5620273d3cf1d8b9c583ce2d3695a9e13641146433fbcc939dce249b3ef97d2f\
    e363630c75d8f681b202aec4617ad3df1ed5d5fd65612433f51f5f066ed0856365553ded1af3b557135e\
    7f57c935984f0c70e0e68b77e2a689daf3efe8721df158a136ade73530acca4f483a797abc0ab182b324\
    fb61d108a94bb2c8e3fbb96adab760d7f4681d4f42a3de394df4ae56ede76372bb190b07a7c8ee0a6d70\
    9e02fce1cdf7e2ecc03404cd28342f619172fe9ce98583ff8e4f1232eef28183c3fe3b1b4c6fad733bb5\
    fcbc2ec22005c58ef1837d1683b2c6f34a26c1b2effa886b4238611fcfdcde355b3b6519035bbc34f4de\
    f99c023861b46fc9d6e6c9077ad91d2691f7f7ee598cb0fac186d91caefe130985139270b4130c93bc43\
    7944f4fd4452e2d74dd364f2e21e71f54bff5cae82ab9c9df69ee86d2bc522363a0dabc521979b0deada\
    1dbf9a42d5c4484e0abcd06bfa53ddef3c1b20ee3fd59d7c25e41d2b669e1ef16e6f52c3164df4fb7930\
    e9e4e58857b6ac7d5f42d69f6d187763cf1d5503400487f55ba57e31cc7a7135c886efb4318aed6a1e01\
    2d9e6832a907600a918130c46dc778f971ad0038092999a333cb8b7a1a1db93d7140003c2a4ecea9f98d\
    0acc0a8291cdcec97dcf8ec9b55a7f88a46b4db5a851f44182e1c68a007e5e0dd9020bfd64b645036c7a\
    4e677d2c38532a3a23ba4442caf53ea63bb454329b7624c8917bdd64b1c0fd4cb38e8c334c701c3acdad\
    0657fccfec719b1f5c3e4e46041f388147fb4cfdb477a52471f7a9a96910b855322edb6340d8a00ef092\
    350511e30abec1fff9e3a26e7fb29f8c183023c3587e38da0077d9b4763e4e4b94b2bbc194c6651e77ca\
    f992eeaac0232a281bf6b3a739c1226116820ae8db5847a67cbef9c9091b462d538cd72b03746ae77f5e\
    62292c311562a846505dc82db854338ae49f5235c95b91178ccf2dd5cacef403ec9d1810c6272b045b3b\
    71f9dc6b80d63fdd4a8e9adb1e6962a69526d43161c1a41d570d7938dad4a40e329ccff46aaa36ad004c\
    f600c8381e425a31d951ae64fdb23fcec9509d43687feb69edd1cc5e0b8cc3bdf64b10ef86b63142a3ab\
    8829555b2f747c932665cb2c0f1cc01bd70229388839d2af05e454504ac78b7582822846c0ba35c35f5c\
    59160cc046fd8251541fc68c9c86b022bb7099876a460e7451a8a93109703fee1c217e6c3826e52c51aa\
    691e0e423cfc99e9e31650c1217b624816cdad9a95f9d5b8019488d9c0a0a1fe3075a577e23183f81d4a\
    3f2fa4571efc8ce0ba8a4fe8b6855dfe72b0a66eded2fbabfbe58a30fafabe1c5d71a87e2f741ef8c1fe\
    86fea6bbfde530677f0d97d11d49f7a8443d0822e506a9f4614e011e2a94838ff88cd68c8bb7c51eef6d";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_primes_match_rfc_7919() {
        // Last bytes of the primes, as RFC 7919 prints them.
        let ends: [(Group, &[u8]); 5] = [
            (Group::Ffdhe2048, &[0x61, 0x28, 0x5c, 0x97]),
            (Group::Ffdhe3072, &[0x66, 0xc6, 0x2e, 0x37]),
            (Group::Ffdhe4096, &[0x5e, 0x65, 0x5f, 0x6a]),
            (Group::Ffdhe6144, &[0xd0, 0xe4, 0x0e, 0x65]),
            (Group::Ffdhe8192, &[0xc5, 0xc6, 0x42, 0x4c]),
        ];
        for (group, end) in ends {
            let prime = group.prime();
            assert_eq!(prime.len(), group.len());
            assert_eq!(
                prime[..12],
                [&[0xff; 8][..], &[0xad, 0xf8, 0x54, 0x58]].concat()
            );
            assert_eq!(prime[prime.len() - 12..prime.len() - 8], *end, "{group:?}");
            assert_eq!(Group::of(group.id()), Some(group));
        }
        assert_eq!(Group::of(6), None);
    }

    #[test]
    fn both_sides_derive_same_key() {
        for group in [Group::Ffdhe2048, Group::Ffdhe3072] {
            let (x, y) = ([3; EXPONENT], [0x91; EXPONENT]);
            let (of_x, of_y) = (group.public(&x), group.public(&y));
            let key = group.shared(&of_y, &x).unwrap();
            assert_eq!(group.shared(&of_x, &y).unwrap(), key);
            assert_eq!(key.len(), group.len());
        }
    }

    #[test]
    fn public_values_with_known_key_are_refused() {
        let group = Group::Ffdhe2048;
        let prime = group.prime();
        let less = |by: u8| {
            let mut bytes = prime.clone();
            *bytes.last_mut().unwrap() -= by;
            bytes
        };
        let small = |value: u8| [vec![0; group.len() - 1], vec![value]].concat();
        let exponent = [5; EXPONENT];
        let refused = [
            small(0),
            small(1),
            less(1),
            prime.clone(),
            vec![0xff; 256],
            vec![2],
            vec![],
        ];
        for public in refused {
            assert!(group.shared(&public, &exponent).is_none(), "{public:x?}");
        }
        assert!(group.shared(&small(2), &exponent).is_some());
        assert!(group.shared(&less(2), &exponent).is_some());
        assert!(Group::Null.shared(&[], &exponent).is_none());
        assert!(Group::Null.public(&exponent).is_empty());
    }
}
