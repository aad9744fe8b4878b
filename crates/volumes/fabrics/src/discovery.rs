//! Client for discovery controllers, for `vnvme discover`.

use crate::connect::{
    Client, ConnectError, ConversationError, Portal, Queue, connect_queue, enable, log_page,
};
use crate::identity::HostIdentity;
use nvme::fabrics::DISCOVERY_NQN;
use nvme::log::Lid;
use nvme::log::discovery::{DiscoveryHeader, DiscoveryRecord};
use nvme_tcp::Host;
use remote::HostPort;
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

/// Time limit for a whole discovery, from connecting to the last record.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of discovery log records that are read from a controller.
const MAX_RECORDS: u64 = 4096;
/// Number of discovery log records that one command reads.
const RECORDS_PER_READ: u64 = 16;
/// Maximum number of times that the log page is read again because it changed during reading.
const MAX_REREADS: u32 = 10;
const LEN: u64 = 1024;

/// Content of a discovery log page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discovered {
    /// Generation counter (GENCTR) of the discovery log page.
    pub generation: u64,
    /// Records of the log page, each with an address of a subsystem.
    pub records: Vec<DiscoveryRecord>,
}

/// Reads the discovery log page of the discovery controller at an address.
///
/// # Errors
/// [`ConnectError`] when the controller cannot be reached or used within ten seconds.
pub fn discover(place: HostPort, identity: &HostIdentity) -> Result<Discovered, ConnectError> {
    let portal = Portal::new(place, DISCOVERY_NQN, identity, Host::default(), None)?;
    let now = Instant::now();
    let deadline = now.checked_add(DISCOVERY_TIMEOUT).unwrap_or(now);
    let (mut client, _) = connect_queue(&portal, Queue::admin(Duration::ZERO), deadline)?;
    read(&mut client, deadline).map_err(|trouble| portal.trouble(trouble))
}

fn read(client: &mut Client, deadline: Instant) -> Result<Discovered, ConversationError> {
    enable(client, deadline)?;
    for _ in 0..MAX_REREADS {
        let before = header(client)?;
        let count = before.numrec.get();
        if count > MAX_RECORDS {
            return Err(ConversationError::Unusable(
                "it has more records than any network",
            ));
        }
        let mut records = Vec::new();
        while (records.len() as u64) < count {
            let done = records.len() as u64;
            let wanted = (count - done).min(RECORDS_PER_READ);
            // At most 16 KiB.
            let len = (wanted * LEN) as u32;
            let page = log_page(client, Lid::DISCOVERY, (done + 1) * LEN, len, true)?;
            let chunks = page.chunks_exact(LEN as usize);
            let read = chunks.filter_map(|chunk| DiscoveryRecord::read_from_bytes(chunk).ok());
            records.extend(read.take(wanted as usize));
            if records.len() as u64 != done + wanted {
                return Err(ConversationError::Unusable(
                    "the discovery log page is shorter than its header \
                                              states",
                ));
            }
        }
        let after = header(client)?;
        if after.genctr == before.genctr && after.numrec == before.numrec {
            let generation = after.genctr.get();
            return Ok(Discovered {
                generation,
                records,
            });
        }
    }
    Err(ConversationError::Unusable(
        "its log page changes all the time",
    ))
}

fn header(client: &mut Client) -> Result<DiscoveryHeader, ConversationError> {
    let page = log_page(client, Lid::DISCOVERY, 0, LEN as u32, true)?;
    let header = DiscoveryHeader::read_from_bytes(&page);
    header.map_err(|_| ConversationError::Unusable("its log page is too short"))
}
