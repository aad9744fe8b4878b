//! `vnvme discover`: prints the log page of a discovery controller.

use crate::cli::table::{Column, TextTable};
use anyhow::{Result, bail};
use clap::Args;
use fabrics::{Discovered, HostIdentity, discover, local_identity};
use nvme::log::discovery::{
    DiscoveryRecord, TREQ_REQUIRED, TREQ_SECURE_CHANNEL, TcpSecurity, TransportType,
};
use output::outln;
use remote::{HostPort, HostPortError, encode};
use serde::Serialize;

/// Default TCP port of an NVMe discovery controller.
const PORT: u16 = 8009;

/// Options of `vnvme discover`.
#[derive(Debug, Args)]
pub struct DiscoverArgs {
    /// Discovery controller: tcp://HOST, or tcp://HOST:PORT for a port other than 8009
    #[arg(value_name = "tcp://HOST:PORT")]
    address: String,
    /// Host NQN to present [default: that of /etc/nvme/hostnqn, or one derived from the machine ID]
    #[arg(long, value_name = "NQN")]
    hostnqn: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Record of the discovery log page: the address of one subsystem.
#[derive(Debug, Serialize)]
struct Record {
    /// Kind of the subsystem: NVMe subsystem, or discovery subsystem.
    kind: String,
    /// NQN of the subsystem at the address.
    subnqn: String,
    transport: String,
    /// Network address of the subsystem, without port.
    address: String,
    /// TCP port of the subsystem (Transport Service Identifier, TRSVCID).
    service: String,
    /// Security of the channel to the subsystem: none, or TLS.
    security: String,
    /// Whether the subsystem requires a secure channel.
    secure_channel_required: bool,
    /// URL of the subsystem as a volume, to which a namespace ID must be appended.
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
}

#[derive(Debug, Serialize)]
struct DiscoveryReport {
    generation: u64,
    records: Vec<Record>,
}

impl DiscoverArgs {
    /// Prints the records of the discovery log page.
    pub fn run(self) -> Result<()> {
        let place = place(&self.address)?;
        let identity = match &self.hostnqn {
            Some(nqn) => match HostIdentity::named(nqn) {
                Ok(identity) => identity,
                Err(why) => bail!("--hostnqn {nqn}: {why}"),
            },
            None => local_identity().clone(),
        };
        let report = DiscoveryReport::from(&discover(place, &identity)?);
        if self.json {
            outln!("{}", serde_json::to_string_pretty(&report)?);
            return Ok(());
        }
        Ok(report.table().print()?)
    }
}

fn place(address: &str) -> Result<HostPort> {
    let name = match address.split_once("://") {
        Some(("tcp" | "nvme+tcp", name)) => name.trim_end_matches('/'),
        Some((other, _)) => bail!("{other}:// is not a supported transport: use tcp://HOST:PORT"),
        None => address,
    };
    match HostPort::parse(name, PORT) {
        Ok(place) => Ok(place),
        Err(HostPortError::NoHost) => bail!("{address}: the host is missing: use tcp://HOST:PORT"),
        Err(HostPortError::Bracket) => bail!("{address}: an IPv6 address ends with a bracket"),
        Err(HostPortError::Port(port)) => bail!("{address}: \"{port}\" is not a port number"),
    }
}

/// Formats bytes from the network as text without control characters.
fn text(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

impl From<&DiscoveryRecord> for Record {
    fn from(record: &DiscoveryRecord) -> Self {
        let address = text(record.traddr.trimmed());
        let service = text(record.trsvcid.trimmed());
        let subnqn = text(record.subnqn.trimmed());
        let tcp = record.trtype == TransportType::TCP;
        let host = if address.contains(':') {
            format!("[{address}]")
        } else {
            address.clone()
        };
        let security = match (tcp, record.tcp_security()) {
            (true, security) if security != TcpSecurity::NONE => security.to_string(),
            _ => TcpSecurity::NONE.to_string(),
        };
        Self {
            kind: record.subtype.to_string(),
            url: record.subnqn.as_str().filter(|_| tcp).map(|nqn| {
                let (service, nqn) = (encode(&service), encode(nqn));
                format!("nvme+tcp://{host}:{service}/{nqn}")
            }),
            subnqn,
            transport: record.trtype.to_string(),
            address,
            service,
            security,
            secure_channel_required: record.treq & TREQ_SECURE_CHANNEL == TREQ_REQUIRED,
        }
    }
}

impl From<&Discovered> for DiscoveryReport {
    fn from(found: &Discovered) -> Self {
        Self {
            generation: found.generation,
            records: found.records.iter().map(Record::from).collect(),
        }
    }
}

impl DiscoveryReport {
    fn table(&self) -> TextTable<6> {
        let columns = [
            "TYPE",
            "TRANSPORT",
            "ADDRESS",
            "SECURITY",
            "SUBSYSTEM",
            "VOLUME",
        ];
        let mut table = TextTable::new(columns.map(Column::Left));
        for record in &self.records {
            let address = match record.service.as_str() {
                "" => record.address.clone(),
                port if record.address.contains(':') => format!("[{}]:{port}", record.address),
                port => format!("{}:{port}", record.address),
            };
            table.row([
                record.kind.clone(),
                record.transport.clone(),
                address,
                record.security.clone(),
                record.subnqn.clone(),
                // Namespace 1 is an example: a discovery controller does not know the namespaces.
                record
                    .url
                    .as_ref()
                    .map_or_else(|| "-".to_owned(), |url| format!("{url}/1")),
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme::identify::{Ascii, Nqn};
    use nvme::log::discovery::SubsystemType;

    #[test]
    fn discovery_records_become_safe_urls() {
        let record = DiscoveryRecord {
            trtype: TransportType::TCP,
            subtype: SubsystemType::NVM,
            trsvcid: Ascii::new("4420").unwrap(),
            traddr: Ascii::new("fe80::1").unwrap(),
            subnqn: Nqn::new("nqn.x:\u{1b}[2J").unwrap(),
            treq: TREQ_REQUIRED,
            ..DiscoveryRecord::default()
        };
        let found = Discovered {
            generation: 3,
            records: vec![record],
        };
        let report = DiscoveryReport::from(&found);
        let json = serde_json::to_string(&report).unwrap();
        assert!(
            json.contains(r"nvme+tcp://[fe80::1]:4420/nqn.x:%1b%5b2J"),
            "{json}"
        );
        let table = report.table().lines().join("\n");
        assert!(
            table.contains("nvme+tcp://[fe80::1]:4420/nqn.x:%1b%5b2J/1"),
            "{table}"
        );
        assert!(report.records[0].secure_channel_required);
        assert_eq!(report.records[0].kind, "nvme subsystem");
    }

    #[test]
    fn discovery_addresses_are_parsed() {
        let of = |text: &str| place(text).map(|place| place.to_string());
        assert_eq!(of("tcp://host").unwrap(), "host:8009");
        assert_eq!(of("tcp://[::1]:7/").unwrap(), "[::1]:7");
        assert_eq!(of("10.0.0.1:4420").unwrap(), "10.0.0.1:4420");
        for (text, why) in [
            ("rdma://host", "not a supported transport"),
            ("tcp://", "the host is missing"),
            ("tcp://host:0", "not a port number"),
            ("tcp://[::1", "bracket"),
        ] {
            assert!(of(text).unwrap_err().to_string().contains(why), "{text}");
        }
    }
}
