//! Authentication of a queue right after its Connect command: DH-HMAC-CHAP ("NVMe Base 2.1",
//! 8.3.5).

use super::client::{Client, Data};
use super::error::ConversationError;
use super::queue::Portal;
use dhchap::{AuthFailure, Host, Names, Random, Secrets};
use nvme::fabrics::Authentication;

/// Authenticates this host to the controller (DH-HMAC-CHAP), and the controller to this host if a
/// secret of the subsystem is configured.
pub(super) fn authenticate(
    client: &mut Client,
    portal: &Portal,
    secrets: &Secrets,
) -> Result<(), ConversationError> {
    let names = Names {
        host: portal.identity.nqn.clone(),
        subsystem: portal.subnqn.clone(),
    };
    let mut host = Host::new(names, secrets.clone(), Random::new()?);
    send(client, &host.negotiate())?;
    let challenge = receive(client)?;
    let reply = host.reply(&challenge).map_err(|why| end(client, why))?;
    let answer = send(client, &reply).and_then(|()| receive(client));
    let success = answer.map_err(unproven)?;
    let last = host.conclude(&success).map_err(|why| end(client, why))?;
    last.map_or(Ok(()), |last| send(client, &last))
}

/// Converts the error after this host has sent its reply. A controller that rejects the reply
/// reports that and closes the connection, and the report may be lost with the connection.
fn unproven(trouble: ConversationError) -> ConversationError {
    if trouble.is_closed() {
        ConversationError::Unproven
    } else {
        trouble
    }
}

/// Sends AUTH_Failure2 and returns the error with which the connection attempt fails.
fn end(client: &mut Client, why: AuthFailure) -> ConversationError {
    if let AuthFailure::ByHost { message, .. } = &why {
        // The connection is closed whether or not the controller answers.
        let _ = send(client, message);
    }
    ConversationError::Authentication(why)
}

fn send(client: &mut Client, message: &[u8]) -> Result<(), ConversationError> {
    // No message is longer than a few KiB.
    let command = Authentication::nvme(message.len() as u32).send(0);
    client.execute("Authentication Send", command, Data::Out(message))?;
    Ok(())
}

fn receive(client: &mut Client) -> Result<Vec<u8>, ConversationError> {
    let room = dhchap::MAX_MESSAGE_LEN as u32;
    let command = Authentication::nvme(room).receive(0);
    let (_, message) = client.execute("Authentication Receive", command, Data::In(room))?;
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    #[test]
    fn connection_lost_during_proof_reports_authentication_failure() {
        for closed in [
            ConversationError::Closed,
            ConversationError::Io(ErrorKind::ConnectionReset.into()),
        ] {
            let trouble = unproven(closed);
            assert!(trouble.to_string().contains("authentication failed"));
            assert!(trouble.is_closed(), "it is tried again as before");
        }
        let silent = unproven(ConversationError::Silent);
        assert!(matches!(silent, ConversationError::Silent), "{silent}");
    }
}
