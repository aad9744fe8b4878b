// SPDX-License-Identifier: GPL-2.0-or-later

//! The plugin's arguments: `-plugin libap_plugin.so,adapter=0,adapter=1,domain=6`.
//!
//! | argument | meaning |
//! |---|---|
//! | `adapter=N` | a card; any number of them (0 and 1 unless told) |
//! | `domain=N` | a domain on every card (6 unless told) |
//! | `control-domain=N` | a domain that the guest may administrate |
//! | `interruption=off` | hide facility 65: the guest polls |
//! | `log=on` | a line for every PQAP that changes something |

use ap::{Facilities, Mask};

/// Parsed arguments of the QEMU plugin.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) adapters: Mask,
    pub(crate) domains: Mask,
    pub(crate) control_domains: Mask,
    pub(crate) facilities: Facilities,
    pub(crate) log: bool,
}

impl Config {
    /// Parses the plugin's arguments; an error names the wrong one.
    pub(crate) fn parse(arguments: &[String]) -> Result<Config, String> {
        let mut config = Config {
            adapters: Mask::EMPTY,
            domains: Mask::EMPTY,
            control_domains: Mask::EMPTY,
            facilities: Facilities::ALL,
            log: false,
        };
        for argument in arguments {
            let wrong = || format!("wrong argument {argument:?}");
            let (name, value) = argument.split_once('=').ok_or_else(wrong)?;
            let number = || value.parse::<u8>().map_err(|_| wrong());
            let switch = || match value {
                "on" => Ok(true),
                "off" => Ok(false),
                _ => Err(wrong()),
            };
            match name {
                "adapter" => config.adapters.insert(number()?),
                "domain" => config.domains.insert(number()?),
                "control-domain" => config.control_domains.insert(number()?),
                "interruption" => config.facilities.interruption = switch()?,
                "log" => config.log = switch()?,
                _ => return Err(wrong()),
            }
        }
        if config.adapters == Mask::EMPTY {
            config.adapters = [0, 1].into_iter().collect();
        }
        if config.domains == Mask::EMPTY {
            config.domains.insert(6);
        }
        Ok(config)
    }
}
