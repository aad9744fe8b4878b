//! What is to be served, as the command line or a configuration file says it: plain values with their defaults.

use crate::direct::PathChoice;
use crate::ublk::UblkSpec;
use crate::vhost_blk::VhostBlkSpec;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use volume::UrlOption;

/// How a client rings doorbells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DoorbellMode {
    /// Each ring is a message; idle disks cost nothing. Guests with shadow doorbells (Linux) hardly ring.
    #[default]
    Trapped,
    /// The client maps the doorbell page and writes it directly; vnvme polls it all the time. For polling hosts.
    Mapped,
}

/// One namespace: a volume and how it is shown.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct NamespaceSpec {
    /// Path or URL.
    #[serde(deserialize_with = "volume_url")]
    pub volume: String,
    /// Namespace ID; by position from 1 when not given.
    pub nsid: Option<u32>,
    /// Logical block size in bytes.
    pub block_size: Option<u32>,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// NGUID, 32 hexadecimal digits.
    pub nguid: Option<String>,
    /// EUI-64, 16 hexadecimal digits.
    pub eui64: Option<String>,
    /// How commands reach a device below; direct where that is possible when not given.
    pub path: Option<PathChoice>,
}

/// One controller: a socket and its namespaces.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ControllerSpec {
    /// Where the VMM connects.
    pub socket: PathBuf,
    /// Model number.
    pub model: Option<String>,
    /// Serial number.
    pub serial: Option<String>,
    /// Firmware revision.
    pub firmware: Option<String>,
    /// NVM subsystem NQN.
    pub subnqn: Option<String>,
    /// Doorbells trapped or mapped; trapped when not given.
    pub doorbells: Option<DoorbellMode>,
    /// Offer shadow doorbells (Doorbell Buffer Config).
    #[serde(default = "yes")]
    pub shadow_doorbells: bool,
    /// Volatile write cache on after power-on.
    #[serde(default = "yes")]
    pub write_cache: bool,
    /// I/O queue pairs.
    pub io_queues: Option<u16>,
    /// Entries per queue.
    pub queue_entries: Option<u32>,
    /// Largest transfer: 4 KiB shifted left by this.
    pub mdts: Option<u8>,
    /// Its namespaces.
    #[serde(rename = "namespace")]
    pub namespaces: Vec<NamespaceSpec>,
}

/// A volume in a configuration file: its URL, or a table of the URL and its options, `{ url = "a.raw", iops = 1000 }`.
pub fn volume_url<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    use serde::de::Error;
    let mut table = match toml::Value::deserialize(deserializer)? {
        toml::Value::String(url) => return Ok(url),
        toml::Value::Table(table) => table,
        other => {
            return Err(D::Error::custom(format!(
                "volume: {other} is no path, URL or table"
            )));
        }
    };
    let Some(toml::Value::String(mut url)) = table.remove("url") else {
        return Err(D::Error::custom("volume: the table has no url"));
    };
    for (key, value) in table {
        let value = match value {
            toml::Value::String(text) => text.replace('%', "%25").replace('&', "%26"),
            toml::Value::Boolean(true) => "on".into(),
            toml::Value::Boolean(false) => "off".into(),
            toml::Value::Integer(number) => number.to_string(),
            other => return Err(D::Error::custom(format!("volume: {key} = {other}"))),
        };
        let sign = if url.contains('?') { '&' } else { '?' };
        url.push_str(&format!("{sign}{key}={value}"));
    }
    Ok(url)
}

pub fn yes() -> bool {
    true
}

/// What a process serves.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Specs {
    /// NVMe controllers.
    #[serde(default, rename = "controller")]
    pub controllers: Vec<ControllerSpec>,
    /// virtio block devices.
    #[serde(default)]
    pub vhost_user_blk: Vec<VhostBlkSpec>,
    /// Block devices of the host.
    #[serde(default)]
    pub ublk: Vec<UblkSpec>,
}

/// Reads a configuration file.
pub fn read_config(path: &Path) -> Result<Specs> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let mut specs: Specs = toml::from_str(&text).with_context(|| format!("{}", path.display()))?;
    ensure!(
        !(specs.controllers.is_empty() && specs.vhost_user_blk.is_empty() && specs.ublk.is_empty()),
        "{}: no [[controller]], no [[vhost-user-blk]] and no [[ublk]]",
        path.display()
    );
    // A volume's URL says the same here as on the command line.
    specs
        .take_url_options()
        .with_context(|| format!("{}", path.display()))?;
    Ok(specs)
}

/// Options in a volume's URL that are the namespace's.
pub const NAMESPACE_OPTIONS: &[UrlOption] = &[
    UrlOption::new(
        "block-size",
        "512|4096",
        "logical block size in bytes [default: the volume's, 512 at least]",
    ),
    UrlOption::new("nsid", "N", "namespace ID [default: by position, from 1]"),
    UrlOption::new(
        "nguid",
        "HEX",
        "NGUID, 32 hexadecimal digits [default: made from serial number and volume]",
    ),
    UrlOption::new(
        "eui64",
        "HEX",
        "EUI-64, 16 hexadecimal digits [default: made from serial number and volume]",
    ),
    UrlOption::new(
        "path",
        "direct|generic",
        "how commands reach a device: as they are, or through the volume \
         [default: direct where that is possible]",
    ),
];

impl Specs {
    fn take_url_options(&mut self) -> Result<()> {
        let mut namespaces = self.controllers.iter_mut().flat_map(|c| &mut c.namespaces);
        namespaces.try_for_each(NamespaceSpec::take_url_options)?;
        for export in &mut self.vhost_user_blk {
            export.take_url_options()?;
        }
        for disk in &mut self.ublk {
            disk.take_url_options()?;
        }
        Ok(())
    }
}

impl NamespaceSpec {
    /// Takes the namespace's own options ([`NAMESPACE_OPTIONS`]) out of the volume's URL; the
    /// others are the volume's.
    pub fn parse(text: &str) -> Result<NamespaceSpec> {
        let mut spec = NamespaceSpec {
            volume: text.to_owned(),
            nsid: None,
            block_size: None,
            read_only: false,
            nguid: None,
            eui64: None,
            path: None,
        };
        spec.take_url_options()?;
        Ok(spec)
    }

    fn take_url_options(&mut self) -> Result<()> {
        let text = self.volume.clone();
        self.volume = take_options(&text, |key, value| {
            let number = || {
                let number = value.parse::<u32>();
                number.with_context(|| format!("{text}: {key}={value}"))
            };
            match key {
                "block-size" => once(&mut self.block_size, key, number()?),
                "nsid" => once(&mut self.nsid, key, number()?),
                "nguid" => once(&mut self.nguid, key, value.to_owned()),
                "eui64" => once(&mut self.eui64, key, value.to_owned()),
                "path" => once(&mut self.path, key, path_choice(&text, value)?),
                _ => return Ok(false),
            }?;
            Ok(true)
        })?;
        Ok(())
    }
}

/// Sets an option that may come only once: in the URL, or as a key beside it.
pub fn once<T>(option: &mut Option<T>, key: &str, value: T) -> Result<()> {
    ensure!(
        option.replace(value).is_none(),
        "option \"{key}\" is given twice"
    );
    Ok(())
}

/// Offers each of a URL's options, `?key=value&...`, to `take`, which says whether it is its own; returns the URL with the
/// others.
pub fn take_options(
    text: &str,
    mut take: impl FnMut(&str, &str) -> Result<bool>,
) -> Result<String> {
    // A path is taken as it is when a file of that very name exists.
    if Path::new(text).exists() {
        return Ok(text.to_owned());
    }
    let Some((volume, query)) = text.split_once('?') else {
        return Ok(text.to_owned());
    };
    let mut rest = Vec::new();
    for pair in query.split('&') {
        let Some((key, value)) = pair.split_once('=') else {
            bail!("{text}: \"{pair}\" is no option: key=value");
        };
        if !take(key, value)? {
            rest.push(pair);
        }
    }
    Ok(match rest.as_slice() {
        [] => volume.to_owned(),
        rest => format!("{volume}?{}", rest.join("&")),
    })
}

fn path_choice(text: &str, value: &str) -> Result<PathChoice> {
    let choice = PathChoice::from_str(value, false);
    choice.map_err(|_| anyhow::anyhow!("{text}: path={value}: direct or generic is expected"))
}

/// `N` bytes from 2*`N` hexadecimal digits; dashes are ignored, so that UUIDs may be given as they are written.
pub fn hex<const N: usize>(name: &str, text: &str) -> Result<[u8; N]> {
    let digits: Vec<u32> = text
        .chars()
        .filter(|c| *c != '-')
        .map(|c| c.to_digit(16).unwrap_or(16))
        .collect();
    ensure!(
        digits.len() == 2 * N && digits.iter().all(|d| *d < 16),
        "{name} \"{text}\": {} hexadecimal digits are needed",
        2 * N
    );
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair.iter().fold(0, |acc, d| acc << 4 | *d as u8);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_of_the_table_is_taken() {
        for option in NAMESPACE_OPTIONS {
            let values = match option.form {
                "N" => "7",
                "HEX" => "0123456789abcdef",
                alternatives => alternatives,
            };
            for value in values.split('|') {
                let text = format!("a.raw?{}={value}", option.name);
                let spec = NamespaceSpec::parse(&text).unwrap();
                assert_eq!(spec.volume, "a.raw");
                assert_ne!(spec, NamespaceSpec::parse("a.raw").unwrap(), "{text}");
            }
        }
    }

    #[test]
    fn namespace_options_are_taken_out_of_the_url() {
        let url = "/d/a.raw?direct=off&block-size=4096&nsid=3&lock=off";
        let spec = NamespaceSpec::parse(url).unwrap();
        assert_eq!(spec.volume, "/d/a.raw?direct=off&lock=off");
        assert_eq!((spec.block_size, spec.nsid), (Some(4096), Some(3)));
        assert_eq!(
            NamespaceSpec::parse("mem://1G?nsid=2").unwrap().volume,
            "mem://1G"
        );
        for bad in ["a?block-size=big", "a?what", "a?nsid=1&nsid=1"] {
            assert!(NamespaceSpec::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn identifiers_in_hex() {
        assert_eq!(
            hex::<8>("eui64", "0011223344556677").unwrap(),
            [0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77]
        );
        assert_eq!(hex::<2>("x", "ab-CD").unwrap(), [0xab, 0xcd]);
        for bad in ["", "00", "0011223344556677ff", "001122334455667g", "äöüß"] {
            assert!(hex::<8>("eui64", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn config_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vnvme.toml");
        std::fs::write(
            &path,
            r#"
            [[controller]]
            socket = "/run/vm0.sock"
            doorbells = "mapped"
            [[controller.namespace]]
            volume = "/disks/a.raw"
            block-size = 4096
            [[controller.namespace]]
            volume = "null://1T"
            read-only = true
            [[controller.namespace]]
            volume = { url = "/disks/b.raw", direct = false, iops = 1000, partlabel = "a&b" }
            [[vhost-user-blk]]
            socket = "/run/vm1.sock"
            volume = { url = "/disks/c.raw", iops = 1000 }
            queue-size = 256
            "#,
        )
        .unwrap();
        let read = read_config(&path).unwrap();
        assert_eq!(read.vhost_user_blk.len(), 1);
        assert_eq!(read.vhost_user_blk[0].volume, "/disks/c.raw?iops=1000");
        assert_eq!(read.vhost_user_blk[0].queue_size, Some(256));
        assert!(read.vhost_user_blk[0].write_cache);
        let specs = read.controllers;
        assert_eq!(specs.len(), 1);
        assert_eq!(specs[0].doorbells, Some(DoorbellMode::Mapped));
        assert!(specs[0].write_cache && specs[0].shadow_doorbells);
        assert_eq!(specs[0].namespaces[0].block_size, Some(4096));
        assert!(specs[0].namespaces[1].read_only);
        let options = specs[0].namespaces[2].volume.split_once('?').unwrap().1;
        let options: std::collections::BTreeSet<&str> = options.split('&').collect();
        let wanted = ["direct=off", "iops=1000", "partlabel=a%26b"];
        assert_eq!(options, wanted.into());
        std::fs::write(
            &path,
            "[[controller]]\nsocket = \"a\"\nserail = \"typo\"\nnamespace = []",
        )
        .unwrap();
        let error = format!("{:#}", read_config(&path).unwrap_err());
        assert!(error.contains("serail"), "{error}");
    }
}
