//! Connecting one queue: socket, initialization, Connect command, authentication.

use super::authenticate::authenticate;
use super::client::{Client, Data};
use super::error::{ConnectError, ConversationError};
use crate::identity::HostIdentity;
use dhchap::Secrets;
use nvme::fabrics::{
    CNTLID_DYNAMIC, Cattr, Connect, ConnectData, Connected, InvalidParameter, SQHD_NO_FLOW_CONTROL,
    status,
};
use nvme::identify::Nqn;
use nvme_tcp::Host;
use remote::{Conversation, HostPort, connect_tcp};
use rustix::net::sockopt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

/// Network address (portal) of a subsystem, with the NQNs of host and subsystem.
#[derive(Debug, Clone)]
pub(crate) struct Portal {
    pub place: HostPort,
    pub addresses: Vec<SocketAddr>,
    pub subnqn: String,
    pub identity: HostIdentity,
    pub host: Host,
    /// Secrets with which this host authenticates; `None` without authentication.
    pub secrets: Option<Secrets>,
}

/// Parameters of the Connect command for one queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Queue {
    pub qid: u16,
    /// Number of entries of the submission queue (SQSIZE + 1), at least 2.
    pub entries: u32,
    /// ID of the controller that the queue belongs to; 0xffff for an Admin queue.
    pub cntlid: u16,
    /// Keep Alive Timeout, which only an Admin queue has.
    pub kato: Duration,
}

impl Queue {
    pub(crate) const fn admin(kato: Duration) -> Self {
        Self {
            qid: 0,
            entries: 32,
            cntlid: CNTLID_DYNAMIC,
            kato,
        }
    }
}

impl Portal {
    /// Creates a portal, after resolving the host name of its address.
    pub(crate) fn new(
        place: HostPort,
        subnqn: &str,
        identity: &HostIdentity,
        host: Host,
        secrets: Option<Secrets>,
    ) -> Result<Self, ConnectError> {
        let addresses = place.resolve().map_err(|error| ConnectError::Name {
            portal: place.to_string(),
            error,
        })?;
        Ok(Self {
            place,
            addresses,
            subnqn: subnqn.into(),
            identity: identity.clone(),
            host,
            secrets,
        })
    }

    pub(crate) fn trouble(&self, trouble: ConversationError) -> ConnectError {
        let portal = self.place.to_string();
        ConnectError::Trouble { portal, trouble }
    }
}

/// Connects a queue. Returns the client of its connection, and the response to the Connect command.
pub(crate) fn connect_queue(
    portal: &Portal,
    queue: Queue,
    deadline: Instant,
) -> Result<(Client, Connected), ConnectError> {
    let fd =
        connect_tcp(&portal.addresses, deadline).map_err(|error| ConnectError::Unreachable {
            portal: portal.place.to_string(),
            error,
        })?;
    // Closing the socket resets the connection and drops unsent bytes, so that data of an old
    // association never reaches the controller after the association was declared ended.
    let _ = sockopt::set_socket_linger(&fd, Some(Duration::ZERO));
    let conversation = Conversation::new(fd, deadline);
    let mut client = Client::new(conversation, portal.host).map_err(|t| portal.trouble(t))?;
    let connected = connect(&mut client, portal, queue).map_err(|t| portal.trouble(t))?;
    Ok((client, connected))
}

/// Offset of the subsystem NQN in the data of a Connect command (NVMe Base 2.1, 6.3).
const SUBNQN_OFFSET: u16 = 256;
/// Offset of the host NQN there.
const HOSTNQN_OFFSET: u16 = 512;

/// Adds to the error of a refused Connect command which name the controller does not accept.
fn refusal(error: ConversationError, portal: &Portal) -> ConversationError {
    let ConversationError::Status { status, dw0, .. } = error else {
        return error;
    };
    let invalid = InvalidParameter::from_bits(dw0);
    let is_about = |offset| {
        status.with_dnr(false) == status::CONNECT_INVALID_PARAMETERS
            && invalid.iattr()
            && invalid.ipo() == offset
    };
    if is_about(SUBNQN_OFFSET) {
        ConversationError::UnknownSubsystem {
            subnqn: portal.subnqn.clone(),
        }
    } else if is_about(HOSTNQN_OFFSET) || status.with_dnr(false) == status::CONNECT_INVALID_HOST {
        ConversationError::HostNotAllowed {
            hostnqn: portal.identity.nqn.clone(),
            subnqn: portal.subnqn.clone(),
        }
    } else {
        error
    }
}

fn connect(
    client: &mut Client,
    portal: &Portal,
    queue: Queue,
) -> Result<Connected, ConversationError> {
    let unusable = ConversationError::Unusable("a name is too long");
    let mut data = ConnectData::new_zeroed();
    data.hostid = portal.identity.id;
    data.cntlid = queue.cntlid.into();
    data.subnqn = Nqn::new(&portal.subnqn).ok_or(unusable)?;
    data.hostnqn = Nqn::new(&portal.identity.nqn).unwrap_or_default();
    let connect = Connect {
        recfmt: 0,
        qid: queue.qid,
        sqsize_z: u16::try_from(queue.entries.max(2) - 1).unwrap_or(u16::MAX),
        // A completion that is sent with a read's data carries no submission queue head.
        cattr: Cattr::new().with_dsqfc(queue.qid != 0),
        kato: u32::try_from(queue.kato.as_millis()).unwrap_or(u32::MAX),
    };
    let command = connect.command(0);
    let connected = client.execute("Connect", command, Data::Out(data.as_bytes()));
    let (entry, _) = connected.map_err(|error| refusal(error, portal))?;
    let connected = Connected::from_bits(entry.dw0.get());
    if queue.qid != 0 {
        // The choice does not matter: outstanding commands never exceed the queue's entries.
        tracing::trace!(
            qid = queue.qid,
            flow_control = client.last_sqhd() != SQHD_NO_FLOW_CONTROL,
            "I/O queue connected"
        );
    }
    if connected.ascr() {
        return Err(ConversationError::Unusable(
            "it wants a secure channel (TLS), which is not supported",
        ));
    }
    match (connected.atr(), &portal.secrets) {
        (true, Some(secrets)) => authenticate(client, portal, secrets)?,
        (true, None) => {
            return Err(ConversationError::Unusable(
                "the controller requires DH-HMAC-CHAP authentication; give the host's secret with \
                 dhchap-secret-file",
            ));
        }
        (false, Some(secrets)) if secrets.controller.is_some() => {
            return Err(ConversationError::Unusable(
                "the controller does not authenticate itself (DH-HMAC-CHAP), as \
                 dhchap-ctrl-secret-file requires",
            ));
        }
        (false, _) => {}
    }
    Ok(connected)
}
