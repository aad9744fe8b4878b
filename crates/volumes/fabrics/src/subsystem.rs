//! A namespace of a remote subsystem and the portals of the subsystem, parsed from a URL.

use nvme::identify::Nqn;
use nvme_tcp::PORT;
use remote::{HostPort, HostPortError, decode, encode};
use std::fmt;

/// Maximum number of portals (network addresses of a subsystem) in a URL.
const MAX_PORTALS: usize = 16;
/// Form of the URL of a remote namespace, for error messages.
const FORM: &str = "nvme+tcp://HOST:PORT/SUBNQN/NSID";

/// Address of a namespace of a remote subsystem, as a URL names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subsystem {
    /// Network addresses of the subsystem; at least one, without duplicates.
    pub portals: Vec<HostPort>,
    /// NQN of the subsystem.
    pub nqn: String,
    /// Namespace ID (NSID) in the subsystem.
    pub nsid: u32,
}

impl Subsystem {
    /// Parses the part of a URL after `nvme+tcp://`: portals separated by commas, the subsystem's
    /// NQN, and the namespace ID, separated by slashes.
    ///
    /// # Errors
    /// A message when a portal, the NQN or the namespace ID is invalid.
    pub fn parse(name: &str) -> Result<Self, String> {
        let (portals, rest) = name.split_once('/').unwrap_or((name, ""));
        let (nqn, nsid) = rest.rsplit_once('/').ok_or_else(|| {
            format!("the subsystem's name and a namespace's number follow the host: {FORM}")
        })?;
        let nqn = decode(nqn)?;
        if nqn.is_empty() || Nqn::new(&nqn).is_none() {
            return Err(format!(
                "\"{nqn}\" is not a subsystem NQN: 1 to {} bytes, like \
                 nqn.2014-08.org.example:disk",
                Nqn::MAX_LEN
            ));
        }
        let number = nsid.parse().ok();
        let nsid = number.filter(|nsid| (1..nvme::cmd::NSID_BROADCAST).contains(nsid));
        let nsid = nsid.ok_or_else(|| {
            format!(
                "\"{}\" is not a namespace ID: a number from 1, as in {FORM}",
                rest.rsplit('/').next().unwrap_or_default()
            )
        })?;
        let places = self::portals(portals)?;
        Ok(Self {
            portals: places,
            nqn,
            nsid,
        })
    }
}

/// Parses a list of portals, separated by commas.
///
/// # Errors
/// A message when a portal is invalid.
pub(crate) fn portals(text: &str) -> Result<Vec<HostPort>, String> {
    let mut places = Vec::new();
    for portal in text.split(',') {
        let place = HostPort::parse(portal, PORT).map_err(|wrong| match wrong {
            HostPortError::NoHost => format!("a portal names its host: {FORM}"),
            HostPortError::Bracket => {
                "an IPv6 address ends with a bracket: nvme+tcp://[::1]:4420/SUBNQN/1".into()
            }
            HostPortError::Port(text) => {
                format!("\"{text}\" is not a port: a number from 1 to 65535 follows the host")
            }
        })?;
        if places.contains(&place) {
            return Err(format!("the portal {place} is named twice"));
        }
        places.push(place);
    }
    if places.len() > MAX_PORTALS {
        return Err(format!("more than {MAX_PORTALS} portals"));
    }
    Ok(places)
}

impl fmt::Display for Subsystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nvme+tcp://")?;
        for (number, portal) in self.portals.iter().enumerate() {
            write!(f, "{}{portal}", if number > 0 { "," } else { "" })?;
        }
        write!(f, "/{}/{}", encode(&self.nqn), self.nsid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_portals_subsystem_and_namespace() {
        let of = |text: &str| Subsystem::parse(text);
        let found = of("10.0.0.1,[::1]:7,host:4421/nqn.2014-08.org.x:a%2fb/c/3").unwrap();
        assert_eq!(found.nqn, "nqn.2014-08.org.x:a/b/c");
        assert_eq!(found.nsid, 3);
        let shown = "nvme+tcp://10.0.0.1:4420,[::1]:7,host:4421/nqn.2014-08.org.x:a%2fb%2fc/3";
        assert_eq!(found.to_string(), shown);
        for (text, why) in [
            ("", "follow the host"),
            ("host", "follow the host"),
            ("host/nqn", "follow the host"),
            ("host//1", "not a subsystem NQN"),
            ("/nqn.x/1", "names its host"),
            ("a,,b/nqn.x/1", "names its host"),
            ("a,a:4420/nqn.x/1", "named twice"),
            ("a:0/nqn.x/1", "not a port"),
            ("[::1/nqn.x/1", "bracket"),
            ("a/nqn.x/0", "not a namespace ID"),
            ("a/nqn.x/", "not a namespace ID"),
            ("a/nqn.x/4294967295", "not a namespace ID"),
            ("a/nqn.x/x", "not a namespace ID"),
            ("a/%0/1", "hexadecimal"),
            (
                "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17/n/1",
                "more than 16",
            ),
        ] {
            assert!(of(text).unwrap_err().contains(why), "{text}");
        }
        let long = format!("a/{}/1", "n".repeat(224));
        assert!(of(&long).unwrap_err().contains("223"));
    }
}
