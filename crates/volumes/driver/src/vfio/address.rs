//! PCI function addresses in the notation of `lspci` and sysfs.

use std::fmt;
use std::str::FromStr;

/// Domain, bus, device and function of a PCI function. Written `0000:44:00.0`; the domain is
/// optional when parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bdf {
    /// PCI domain number; above FFFFh behind some bridges (Intel VMD: `10000:01:00.0`).
    pub domain: u32,
    /// PCI bus number.
    pub bus: u8,
    /// PCI device number, 0 to 31.
    pub device: u8,
    /// PCI function number, 0 to 7.
    pub function: u8,
}

/// Error for a text that is not a PCI address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a PCI address like 0000:44:00.0 (see lspci -D)")]
pub struct BadAddress(String);

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Bdf {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for Bdf {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Bdf, BadAddress> {
        parse(text).ok_or_else(|| BadAddress(text.to_string()))
    }
}

fn parse(text: &str) -> Option<Bdf> {
    let (front, function) = text.split_once('.')?;
    let (front, device) = front.rsplit_once(':')?;
    let (domain, bus) = front.rsplit_once(':').unwrap_or(("0", front));
    Some(Bdf {
        domain: digits(domain, 8)?,
        bus: u8::try_from(digits(bus, 2)?).ok()?,
        device: u8::try_from(digits(device, 2)?).ok().filter(|d| *d < 32)?,
        function: u8::try_from(digits(function, 1)?).ok().filter(|f| *f < 8)?,
    })
}

/// Parses 1 to `most` hexadecimal digits and nothing else; `from_str_radix` alone would also accept
/// a sign.
fn digits(text: &str, most: usize) -> Option<u32> {
    let plain = (1..=most).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    plain.then(|| u32::from_str_radix(text, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_in_lspci_form_are_parsed() {
        let bdf = Bdf {
            domain: 0,
            bus: 0x44,
            device: 0x1f,
            function: 7,
        };
        assert_eq!("0000:44:1f.7".parse(), Ok(bdf));
        assert_eq!("44:1f.7".parse(), Ok(bdf));
        assert_eq!("10000:01:00.0".parse::<Bdf>().unwrap().domain, 0x10000);
    }

    #[test]
    fn malformed_address_is_refused() {
        for text in [
            "",
            ".",
            ":",
            "44",
            "44:00",
            "44.0",
            "0000:44:00.8",
            "0000:44:20.0",
            "0000:444:00.0",
            "0000:44:00.0 ",
            "+000:44:00.0",
            "0000:44:00.0/1",
            "000000000:44:00.0",
            "../44:00.0",
            "1:2:3:4.5",
            "::.",
            "0000:44:00.",
        ] {
            assert!(text.parse::<Bdf>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn printed_address_parses_back(domain: u32, bus: u8, device in 0..32u8, function in 0..8u8) {
            let bdf = Bdf { domain, bus, device, function };
            prop_assert_eq!(bdf.to_string().parse::<Bdf>(), Ok(bdf));
        }

        #[test]
        fn random_text_causes_no_panic(text: String) {
            let _ = text.parse::<Bdf>();
        }
    }
}
