-- uses: credentials
-- Answers for each key all role@host that have registered it. Several may: a process that registers
-- another's key does not replace its owner. A bulk port's key counts while the other key of its
-- process does.
local function has_owner(role_keys, public, value)
  if not is_bulk(public) then return true end
  local owner = string.match(value, ' (.*)$') or ''
  return redis.call('HEXISTS', role_keys, owner) == 1
    and redis.call('SISMEMBER', REVOKED, owner) == 0
end

local owners = {}
for index, public in ipairs(args.keys) do
  owners[index] = {revoked = redis.call('SISMEMBER', REVOKED, public) == 1}
end
for _, host in ipairs(redis.call('SMEMBERS', ADMITTED)) do
  for _, role in ipairs(args.roles) do
    local values = redis.call('HMGET', keys_of_role(role, host), unpack(args.keys))
    for index, value in ipairs(values) do
      if value and not owners[index].revoked
        and has_owner(keys_of_role(role, host), args.keys[index], value) then
        table.insert(owners[index], role .. '@' .. host)
      end
    end
  end
end
local texts = {}
for index, names in ipairs(owners) do texts[index] = table.concat(names, ' ') end
return cjson.encode({owners = texts})
