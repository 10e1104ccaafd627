"""Errors as the libraries raise them: which pass, and which OSError tells them."""

from __future__ import annotations

import errno
from typing import Any

import aiohttp
import asyncssh
import pytest
from aiohttp.http_exceptions import ContentLengthError, TransferEncodingError
from botocore import exceptions as botocore
from fsspec.exceptions import FSTimeoutError
from multidict import CIMultiDict, CIMultiDictProxy
from s3fs.errors import translate_boto_error
from yarl import URL

from elasticflow.errors import StorageError
from elasticflow.storage import errors


def s3(status: int, code: str) -> Exception:
    """Return what s3fs raises when S3 answers so."""
    response: Any = {
        "Error": {"Code": code, "Message": "in words"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error: Exception = translate_boto_error(botocore.ClientError(response, "PutObject"))
    return error


def web_answer(status: int) -> Exception:
    """Return what aiohttp raises for an answer."""
    url = URL("http://store/x")
    asked = aiohttp.RequestInfo(url, "GET", CIMultiDictProxy(CIMultiDict()), url)
    return aiohttp.ClientResponseError(asked, (), status=status, message="in words")


def caused(error: Exception, cause: Exception) -> Exception:
    """Return *error* as raised from *cause*."""
    error.__cause__ = cause
    return error


PASSES: list[tuple[Exception, type[OSError]]] = [
    (ConnectionResetError("reset"), ConnectionResetError),
    (TimeoutError("no answer"), TimeoutError),
    (OSError(errno.EHOSTUNREACH, "No route to host"), ConnectionError),
    (s3(500, "InternalError"), OSError),
    (s3(503, "SlowDown"), OSError),
    (s3(503, "ServiceUnavailable"), OSError),
    (s3(429, "TooManyRequests"), OSError),
    (botocore.EndpointConnectionError(endpoint_url="http://x"), ConnectionError),
    (botocore.ReadTimeoutError(endpoint_url="http://x"), TimeoutError),
    (botocore.ConnectTimeoutError(endpoint_url="http://x"), TimeoutError),
    (botocore.ConnectionClosedError(endpoint_url="http://x"), ConnectionError),
    (botocore.FlexibleChecksumError(error_msg="Expected checksum 4Kt"), ConnectionError),
    (web_answer(500), OSError),
    (aiohttp.ClientPayloadError("cut"), ConnectionError),
    (caused(aiohttp.ClientPayloadError("cut"), ContentLengthError("not enough data")), ConnectionError),
    (caused(aiohttp.ClientPayloadError("cut"), TransferEncodingError("no last chunk")), ConnectionError),
    (aiohttp.ServerDisconnectedError(), ConnectionError),
    (FSTimeoutError(), TimeoutError),
    (asyncssh.ConnectionLost("lost"), ConnectionError),
    (asyncssh.SFTPConnectionLost("lost"), ConnectionError),
]
STAYS: list[tuple[Exception, type[OSError]]] = [
    (FileNotFoundError("absent"), FileNotFoundError),
    (PermissionError("refused"), PermissionError),
    (OSError(errno.ENOSPC, "No space left on device"), OSError),
    (OSError(errno.EROFS, "Read-only file system"), OSError),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), OSError),
    (StorageError("read-only"), OSError),
    (s3(403, "AccessDenied"), PermissionError),
    (s3(403, "InvalidAccessKeyId"), PermissionError),
    (s3(404, "NoSuchBucket"), FileNotFoundError),
    (s3(400, "InvalidRequest"), OSError),
    (s3(501, "NotImplemented"), OSError),
    (botocore.NoCredentialsError(), PermissionError),
    (OSError("Forbidden: https://storage\nno"), PermissionError),
    (web_answer(403), PermissionError),
    (web_answer(507), OSError),
    (asyncssh.SFTPNoSuchFile("no"), FileNotFoundError),
    (asyncssh.SFTPPermissionDenied("no"), PermissionError),
    (asyncssh.SFTPFailure("Failure"), OSError),
    (asyncssh.PermissionDenied("no key fits"), PermissionError),
    (asyncssh.HostKeyNotVerifiable("unknown host"), OSError),
    (ValueError("wrong"), OSError),
]


@pytest.mark.parametrize(("error", "kind"), PASSES, ids=repr)
def test_what_passes(error: Exception, kind: type[OSError]) -> None:
    """No answer, a cut one, too many requests and server errors pass."""
    assert errors.is_transient(error)
    assert errors.kind_of(error) is kind


@pytest.mark.parametrize(("error", "kind"), STAYS, ids=repr)
def test_what_stays(error: Exception, kind: type[OSError]) -> None:
    """What is refused, absent, full or wrong stays so."""
    assert not errors.is_transient(error)
    assert errors.kind_of(error) is kind


@pytest.mark.nightly
def test_errors_of_azure_and_google() -> None:
    """They pass or stay as those of other stores do."""
    from azure.core import exceptions as azure
    from gcsfs.retry import HttpError

    def answered(kind: Any, status: int) -> Any:
        error = kind("in words")
        error.status_code = status
        return error

    for error, kind in (
        (answered(azure.HttpResponseError, 503), OSError),
        (azure.ServiceRequestError("cannot connect"), ConnectionError),
        (caused(RuntimeError("Failed to upload block"), azure.ServiceResponseError("cut")), ConnectionError),
        (HttpError({"code": 502, "message": "bad gateway"}), OSError),
        (HttpError({"code": "429", "message": "slower"}), OSError),
    ):
        test_what_passes(error, kind)
    for error, kind in (
        (answered(azure.ClientAuthenticationError, 403), PermissionError),
        (caused(RuntimeError("Failed"), answered(azure.ResourceNotFoundError, 404)), FileNotFoundError),
        (HttpError({"code": 401, "message": "who are you"}), PermissionError),
    ):
        test_what_stays(error, kind)


def test_number_is_kept() -> None:
    """A full disk is still told as such after its words were replaced."""
    error = errors.as_os_error(OSError(errno.ENOSPC, "secret"), "masked")
    assert (error.errno, error.strerror) == (errno.ENOSPC, "masked")
