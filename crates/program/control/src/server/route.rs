//! Table of the requests and their paths.

use super::calls;
use crate::daemon::Daemon;
use crate::error::Error;
use hyper::{StatusCode, Uri};
use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// HTTP methods that the API uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Post,
    Patch,
    Delete,
}

impl Method {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
        }
    }
}

/// Whether a request may change anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// The request changes nothing.
    Question,
    /// The request may change something.
    Change,
}

/// Answer to an API request: HTTP status, content type and body.
#[derive(Debug)]
pub(super) struct Reply {
    pub status: StatusCode,
    pub content_type: &'static str,
    pub body: Vec<u8>,
}

impl Reply {
    /// Creates an answer with a JSON body.
    pub(super) fn json(value: &impl Serialize) -> Result<Self, Error> {
        let body = serde_json::to_vec(value).map_err(|error| Error::failed(error.to_string()))?;
        Ok(Self::text("application/json", body))
    }

    /// Creates an answer with a text of this content type.
    pub(super) fn text(content_type: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status: StatusCode::OK,
            content_type,
            body: body.into(),
        }
    }

    /// Creates the answer to a successful request that returns nothing.
    pub(super) fn done() -> Self {
        Self {
            status: StatusCode::NO_CONTENT,
            ..Self::text("application/json", "")
        }
    }

    /// Returns the answer with another HTTP status.
    pub(super) fn with(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }
}

/// Parameters of an API request, from its path, query and body.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    /// Values of the `{...}` segments of the path.
    path: Vec<(&'static str, String)>,
    query: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Arguments {
    /// Returns the value of the path segment `{name}`.
    pub(super) fn path(&self, name: &str) -> &str {
        let found = self.path.iter().find(|(known, _)| *known == name);
        found.map_or("", |(_, value)| value)
    }

    /// Returns the namespace ID in the path, or an error if it is not a number.
    pub(super) fn nsid(&self) -> Result<u32, Error> {
        let text = self.path("nsid");
        let number = text.parse().ok().filter(|nsid| *nsid > 0);
        number.ok_or_else(|| Error::invalid(format!("\"{text}\" is not a namespace ID")))
    }

    /// Returns the value of an on-off query parameter; off if it is absent.
    pub(super) fn switch(&self, name: &str) -> Result<bool, Error> {
        let found = self.query.iter().find(|(known, _)| known == name);
        match found.map(|(_, value)| &**value) {
            None | Some("false") => Ok(false),
            Some("true" | "") => Ok(true),
            Some(value) => Err(Error::invalid(format!(
                "{name} is true or false, not \"{value}\""
            ))),
        }
    }

    /// Parses the body of the request, which is JSON.
    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, Error> {
        if self.body.is_empty() {
            return Err(Error::invalid("the request has no body"));
        }
        serde_json::from_slice(&self.body).map_err(|error| {
            Error::invalid(format!(
                "the body of the request: {error}; it is JSON, as /v1/openapi.json describes"
            ))
        })
    }
}

/// How a request is answered.
#[derive(Clone, Copy)]
pub(super) enum Run {
    /// By this function, on a thread that may block.
    Call(fn(&dyn Daemon, &Arguments) -> Result<Reply, Error>),
    /// By a stream of events.
    Events,
}

/// Row of the table of API requests.
#[derive(Clone, Copy)]
pub(super) struct Route {
    pub method: Method,
    /// Path, with `{name}` for variable segments.
    pub path: &'static str,
    pub access: Access,
    /// Whether the request has a body.
    pub body: bool,
    /// Names of the query parameters that the request may have.
    query: &'static [&'static str],
    pub run: Run,
}

type Call = fn(&dyn Daemon, &Arguments) -> Result<Reply, Error>;

const fn get(path: &'static str, call: Call) -> Route {
    Route {
        method: Method::Get,
        path,
        access: Access::Question,
        body: false,
        query: &[],
        run: Run::Call(call),
    }
}

const fn change(method: Method, path: &'static str, call: Call) -> Route {
    Route {
        method,
        path,
        access: Access::Change,
        body: false,
        query: &[],
        run: Run::Call(call),
    }
}

impl Route {
    const fn with_body(self) -> Self {
        Self { body: true, ..self }
    }

    const fn with_query(self, query: &'static [&'static str]) -> Self {
        Self { query, ..self }
    }
}

/// Table of all API requests. docs/openapi.json is generated from the functions' descriptions.
pub(super) static ROUTES: &[Route] = &[
    get("/", calls::page),
    get("/metrics", calls::metrics),
    get("/v1/openapi.json", calls::openapi),
    get("/v1/stats", calls::stats),
    get("/v1/config", calls::save),
    get("/v1/disks", calls::list),
    get("/v1/disks/{name}", calls::show),
    get("/v1/exports", calls::list_exports),
    get("/v1/limits", calls::list_limits),
    get("/v1/on-error", calls::list_on_error),
    get("/v1/paths", calls::list_paths),
    get("/v1/ana", calls::list_ana),
    get("/v1/devices", calls::list_devices),
    Route {
        run: Run::Events,
        ..get("/v1/events", calls::stats)
    },
    change(Method::Post, "/v1/disks", calls::add).with_body(),
    change(Method::Delete, "/v1/disks/{name}", calls::remove).with_query(&["force"]),
    change(Method::Post, "/v1/disks/{name}/accept", calls::accept),
    change(Method::Post, "/v1/disks/{name}/namespaces", calls::attach).with_body(),
    change(
        Method::Delete,
        "/v1/disks/{name}/namespaces/{nsid}",
        calls::detach,
    ),
    change(
        Method::Patch,
        "/v1/disks/{name}/namespaces/{nsid}",
        calls::resize,
    )
    .with_body(),
    change(Method::Post, "/v1/exports", calls::export).with_body(),
    change(Method::Delete, "/v1/exports/{name}", calls::unexport),
    change(Method::Post, "/v1/apply", calls::apply)
        .with_body()
        .with_query(&["dry-run"]),
    change(Method::Post, "/v1/reload", calls::reload),
    change(Method::Post, "/v1/upgrade", calls::upgrade),
    change(Method::Patch, "/v1/limits", calls::limits).with_body(),
    change(Method::Patch, "/v1/on-error", calls::on_error).with_body(),
    change(Method::Patch, "/v1/paths", calls::paths).with_body(),
    change(Method::Patch, "/v1/ana", calls::ana).with_body(),
    change(
        Method::Post,
        "/v1/devices/{address}/suspend",
        calls::suspend,
    ),
    change(Method::Post, "/v1/devices/{address}/resume", calls::resume),
];

/// Reason why no route matches a request.
#[derive(Debug)]
pub(super) struct Missing {
    pub error: Error,
    /// HTTP methods of the routes with this path, if there are any.
    pub allow: Option<String>,
}

impl From<Error> for Missing {
    fn from(error: Error) -> Self {
        Self { error, allow: None }
    }
}

/// Finds the route of a request, and parses the parameters of its address.
pub(super) fn find(method: &str, uri: &Uri) -> Result<(&'static Route, Arguments), Missing> {
    let segments = uri.path().split('/').map(decode);
    let segments = segments.collect::<Result<Vec<_>, _>>()?;
    let mut allow = Vec::new();
    for route in ROUTES {
        let Some(path) = matched(route.path, &segments) else {
            continue;
        };
        if route.method.name() != method {
            allow.push(route.method.name());
            continue;
        }
        let query = query(uri, route.query)?;
        let arguments = Arguments {
            path,
            query,
            body: Vec::new(),
        };
        return Ok((route, arguments));
    }
    let path = uri.path();
    if allow.is_empty() {
        let message = format!("no resource at {path}; /v1/openapi.json describes all resources");
        return Err(Error::not_found(message).into());
    }
    let allow = allow.join(", ");
    let message = format!("{path} has {allow}, not {method}");
    Err(Missing {
        error: Error::invalid(message),
        allow: Some(allow),
    })
}

fn decode(text: &str) -> Result<String, Error> {
    let decoded = percent_decode_str(text).decode_utf8();
    let decoded = decoded.map_err(|_| Error::invalid("the address is not UTF-8"))?;
    Ok(decoded.into_owned())
}

/// Returns the values of a route's `{...}` segments, if the segments match the route.
fn matched(path: &'static str, segments: &[String]) -> Option<Vec<(&'static str, String)>> {
    let mut found = Vec::new();
    let mut wanted = path.split('/');
    for segment in segments {
        let wanted = wanted.next()?;
        let name = wanted
            .strip_prefix('{')
            .and_then(|name| name.strip_suffix('}'));
        match name {
            Some(_) if segment.is_empty() => return None,
            Some(name) => found.push((name, segment.clone())),
            None if wanted == segment => {}
            None => return None,
        }
    }
    wanted.next().is_none().then_some(found)
}

fn query(uri: &Uri, known: &[&str]) -> Result<Vec<(String, String)>, Error> {
    let pairs = uri.query().unwrap_or_default().split('&');
    let pairs = pairs.filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if !known.contains(&name) {
            let known = match known {
                [] => "none".to_owned(),
                names => names.join(", "),
            };
            let message = format!("unknown query parameter \"{name}\"; known are {known}");
            return Err(Error::invalid(message));
        }
        Ok((name.to_owned(), decode(value)?))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn found(method: &str, uri: &str) -> Result<(&'static str, Arguments), Missing> {
        let uri = uri.parse().unwrap();
        find(method, &uri).map(|(route, arguments)| (route.path, arguments))
    }

    #[test]
    fn paths_map_to_routes() {
        let (path, arguments) = found("PATCH", "/v1/disks/vm%2F0%20a/namespaces/7").unwrap();
        assert_eq!(path, "/v1/disks/{name}/namespaces/{nsid}");
        assert_eq!(
            (arguments.path("name"), arguments.nsid()),
            ("vm/0 a", Ok(7))
        );
        let (path, arguments) = found("DELETE", "/v1/disks/a?force=true").unwrap();
        assert_eq!(path, "/v1/disks/{name}");
        assert_eq!(arguments.switch("force"), Ok(true));
        assert_eq!(found("GET", "/").unwrap().0, "/");
        for (method, uri, word) in [
            ("GET", "/v1", "/v1/openapi.json"),
            ("GET", "/v1/disks/", "no resource"),
            ("GET", "/v1/disks/a/b", "no resource"),
            ("GET", "//v1/disks", "no resource"),
            ("GET", "/v1/disks/%ff", "UTF-8"),
            ("GET", "/v1/stats?pretty", "pretty"),
            ("DELETE", "/v1/disks/a?forec=true", "force"),
            ("PUT", "/v1/disks", "GET, POST"),
            ("POST", "/", "GET"),
        ] {
            let missing = found(method, uri).unwrap_err();
            assert!(missing.error.message.contains(word), "{uri}: {missing:?}");
            assert_eq!(missing.allow.is_some(), word.contains("GET"), "{uri}");
        }
        for bad in ["0", "-1", "x", "4294967296"] {
            let (_, arguments) = found("DELETE", &format!("/v1/disks/a/namespaces/{bad}")).unwrap();
            assert!(arguments.nsid().is_err(), "{bad}");
        }
    }

    /// The document describes exactly the existing routes.
    #[test]
    fn document_has_exactly_all_routes() {
        let text = super::super::openapi::document();
        let document: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut described = BTreeSet::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                let route = ROUTES.iter().find(|route| {
                    route.path == path && route.method.name().eq_ignore_ascii_case(method)
                });
                let route = route.unwrap_or_else(|| panic!("no {method} {path}"));
                let has_body = operation.get("requestBody").is_some();
                assert_eq!(has_body, route.body, "{method} {path}");
                let parameters = operation["parameters"].as_array();
                let queries = parameters.into_iter().flatten();
                let queries = queries.filter(|one| one["in"] == "query");
                let names: Vec<_> = queries.map(|one| one["name"].as_str().unwrap()).collect();
                assert_eq!(names, route.query, "{method} {path}");
                described.insert((route.path, route.method.name()));
            }
        }
        assert_eq!(described.len(), ROUTES.len(), "a route without description");
    }

    /// docs/openapi.json is the document; written when `VNVME_WRITE_DOCS` is set (`make docs`).
    #[test]
    fn api_reference_matches_document() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/openapi.json");
        let document = super::super::openapi::document();
        if std::env::var_os("VNVME_WRITE_DOCS").is_some() {
            std::fs::write(path, &document).unwrap();
        }
        let there = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            there == document,
            "docs/openapi.json is not up to date: make docs"
        );
    }
}
